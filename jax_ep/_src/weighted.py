"""Remembers which arrays already carry their row weights, so that combine refuses a second set.

Arrays and tracers are not hashable, so the table is keyed by identity. It holds weak references:
nothing is kept alive, and an entry goes away with its array, before the identity can be reused.
"""

from __future__ import annotations

import weakref

import jax

_weighted: dict[int, weakref.ref[jax.Array]] = {}


def mark(rows: jax.Array) -> None:
    """Notes that `rows` were multiplied by row weights."""
    key = id(rows)
    _weighted[key] = weakref.ref(rows, lambda _: _weighted.pop(key, None))


def is_marked(rows: jax.Array) -> bool:
    """Returns whether `rows` is an array that was marked, not merely one computed from it."""
    reference = _weighted.get(id(rows))
    return reference is not None and reference() is rows
