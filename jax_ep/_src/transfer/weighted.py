"""Remembers which arrays already carry their row weights, so that combine refuses a second set.

Arrays and tracers are not hashable, so the table is keyed by identity. It holds weak references:
nothing is kept alive, and an entry goes away with its array, before the identity can be reused.
"""

from __future__ import annotations

import weakref

import jax

from jax_ep._src.core.errors import ArgumentError

_weighted: dict[int, weakref.ref[jax.Array]] = {}


def mark(rows: jax.Array) -> None:
    """Notes that `rows` were multiplied by row weights."""
    key = id(rows)
    _weighted[key] = weakref.ref(rows, lambda _: _weighted.pop(key, None))


def is_marked(rows: jax.Array) -> bool:
    """Returns whether `rows` is an array that was marked, not merely one computed from it."""
    reference = _weighted.get(id(rows))
    return reference is not None and reference() is rows


def check_unweighted(operation: str, y: jax.Array, row_weights: jax.Array | None) -> None:
    """Raises if `y` carries its row weights already, so that they would count twice."""
    if row_weights is not None and is_marked(y):
        raise ArgumentError(
            f"jax_ep.{operation}: y is an output of grouped_mlp that was given row weights, and "
            "row_weights are given here again; expected them once. Give None here, or give "
            "grouped_mlp none."
        )
