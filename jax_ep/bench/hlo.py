"""What a compiled program holds: evidence of what was timed."""

from __future__ import annotations

import collections
import re

# An asynchronous one starts with -start, and ends with -done, which is not another.
_COLLECTIVE = re.compile(
    r" (ragged-all-to-all|all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)"
    r"(?:-start)?\("
)
_CUSTOM_CALL = re.compile(r' custom-call(?:-start)?\(.*?custom_call_target="([^"]*)"')


def custom_calls(text: str) -> dict[str, int]:
    """How often each custom call is in a program's text."""
    return dict(collections.Counter(_CUSTOM_CALL.findall(text)))


def collectives(text: str) -> dict[str, int]:
    """How often each collective is in a program's text."""
    return dict(collections.Counter(_COLLECTIVE.findall(text)))
