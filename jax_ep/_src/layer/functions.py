"""The activation and `experts_fn` of users, in eager calls: traced each time, compiled once.

The first call of its kind records the shapes that the layer calls them with. Every call traces them
for these shapes; layers whose functions compute the same are one program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jax_ep._src.core.traced import Traced, trace
from jax_ep._src.layer.config import Config


class CallSite(NamedTuple):
    """A call of a user's function: its option, and what it is called with."""

    name: str
    avals: tuple[Any, ...]
    structure: Any


Functions = tuple[tuple[CallSite, Traced], ...]
"""What the functions compute where they are called. Hashed by value."""


def function_names(config: Config) -> tuple[str, ...]:
    """The options that are functions."""
    return tuple(n for n in ("activation", "experts_fn") if callable(getattr(config, n)))


def recording(config: Config, sites: dict[CallSite, None]) -> Config:
    """The options with functions that add their calls to `sites`."""

    def record(name: str, function: Callable[..., Any], *args: Any) -> Any:
        sites[_site(name, args)] = None
        return function(*args)

    return _replace(config, record)


def trace_at(config: Config, sites: tuple[CallSite, ...]) -> tuple[Functions, list[Any]]:
    """Calls the functions in the context of their sites; returns the arrays they close over too."""
    found = [
        trace(getattr(config, site.name), *jax.tree.unflatten(site.structure, site.avals))
        for site in sites
    ]
    traces = tuple((site, traced) for site, (traced, _) in zip(sites, found, strict=True))
    return traces, [constants for _, constants in found]


def without_functions(config: Config) -> Config:
    """The options, equal for all functions of as many arguments."""
    stand_ins: dict[str, Any] = {}
    for name in function_names(config):
        is_gated = name == "activation" and config.is_gated
        stand_ins[name] = _stand_in_for_gated if is_gated else _stand_in
    return dataclasses.replace(config, **stand_ins)


def replaying(config: Config, functions: Functions, constants: list[Any]) -> Config:
    """The options with functions that compute what was traced, on other arrays."""
    found = {site: (call, c) for (site, call), c in zip(functions, constants, strict=True)}

    def replay(name: str, function: Callable[..., Any], *args: Any) -> Any:
        traced, constants = found[_site(name, args)]
        return traced(constants, *args)

    return _replace(config, replay)


def _replace(config: Config, call: Callable[..., Any]) -> Config:
    """The options with ``call(name, function, *args)`` for each function."""
    calls: dict[str, Any] = {}
    for name in function_names(config):
        function = getattr(config, name)
        # The signature says whether an activation is gated.
        calls[name] = functools.wraps(function)(functools.partial(call, name, function))
    return dataclasses.replace(config, **calls)


def _site(name: str, args: tuple[Any, ...]) -> CallSite:
    leaves, structure = jax.tree.flatten(args)
    return CallSite(name, tuple(map(jax.typeof, leaves)), structure)


def _stand_in(*arrays: Any) -> Any:
    raise AssertionError("replaced by what was traced")


def _stand_in_for_gated(gate: Any, up: Any) -> Any:
    raise AssertionError("replaced by what was traced")
