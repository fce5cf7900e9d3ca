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
from jax_ep._src.layer.split import SplitFunction


class CallSite(NamedTuple):
    """A call of a user's function: its option, the arrays it holds, and what it is called with."""

    name: str
    avals: tuple[Any, ...]
    structure: Any


Functions = tuple[tuple[CallSite, Traced], ...]
"""What the functions compute where they are called. Hashed by value."""


def function_names(config: Config) -> tuple[str, ...]:
    """The options that are functions."""
    return tuple(n for n in ("activation", "experts_fn") if callable(getattr(config, n)))


def held_arrays(config: Config) -> dict[str, list[Any]]:
    """The arrays that functions hold, which a `shard_map` takes as arguments, by option."""
    return {name: SplitFunction(getattr(config, name)).arrays for name in function_names(config)}


def calling(config: Config, held: dict[str, list[Any]]) -> Config:
    """The options with functions that hold these arrays instead of their own."""

    def call(name: str, function: Callable[..., Any], *args: Any) -> Any:
        return _call(function, held[name], *args)

    return _replace(config, call)


def recording(config: Config, held: dict[str, list[Any]], sites: dict[CallSite, None]) -> Config:
    """The options with functions that add their calls to `sites`."""

    def record(name: str, function: Callable[..., Any], *args: Any) -> Any:
        sites[_site(name, (held[name], *args))] = None
        return _call(function, held[name], *args)

    return _replace(config, record)


def trace_at(config: Config, sites: tuple[CallSite, ...]) -> tuple[Functions, list[Any]]:
    """Calls the functions in the context of their sites; returns the arrays they close over too."""
    found = [
        trace(
            functools.partial(_call, getattr(config, site.name)),
            *jax.tree.unflatten(site.structure, site.avals),
        )
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


def replaying(
    config: Config, held: dict[str, list[Any]], functions: Functions, constants: list[Any]
) -> Config:
    """The options with functions that compute what was traced, on other arrays."""
    found = {site: (call, c) for (site, call), c in zip(functions, constants, strict=True)}

    def replay(name: str, function: Callable[..., Any], *args: Any) -> Any:
        args = held[name], *args
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


def _call(function: Callable[..., Any], held: list[Any], *args: Any) -> Any:
    return (SplitFunction(function).merge(held) if held else function)(*args)


def _site(name: str, args: tuple[Any, ...]) -> CallSite:
    leaves, structure = jax.tree.flatten(args)
    return CallSite(name, tuple(map(jax.typeof, leaves)), structure)


def _stand_in(*arrays: Any) -> Any:
    raise AssertionError("replaced by what was traced")


def _stand_in_for_gated(gate: Any, up: Any) -> Any:
    raise AssertionError("replaced by what was traced")
