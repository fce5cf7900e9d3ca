"""What a compiled program holds: evidence of what was timed."""

from __future__ import annotations

import collections
import re

_COLLECTIVE = re.compile(
    r" (ragged-all-to-all|all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)"
    r"(?:-start)?\("  # an asynchronous one ends with -done, which is not another
)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) [^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)


def custom_calls(text: str) -> dict[str, int]:
    """How often each custom call is in a program's text."""
    return dict(collections.Counter(re.findall(r'custom_call_target="([^"]*)"', text)))


def collectives(text: str) -> dict[str, int]:
    """How often each collective is in a program's text."""
    return dict(collections.Counter(_COLLECTIVE.findall(text)))


def loops(text: str) -> str:
    """The part of a program's text that loops repeat: their bodies and what these call."""
    computations = dict(_COMPUTATION.findall(text))
    reached: list[str] = []
    pending = re.findall(r"\bbody=%?([\w.-]+)", text)
    while pending:
        name = pending.pop()
        if name in computations and name not in reached:
            reached.append(name)
            pending += re.findall(r"[\w.-]+", computations[name])
    return "\n".join(computations[name] for name in reached)
