"""Loops and divisions of the pure-JAX implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jax_ep._src.core import compat


def divide(values: jax.Array, divisor: int) -> jax.Array:
    """Divides numbers that are not negative: `//` also rounds negative ones, in ten operations."""
    return lax.div(values, lax.full_like(values, divisor))


def fori_loop(
    count: Any,
    body: Callable[[jax.Array, jax.Array], jax.Array],
    initial: jax.Array,
    *,
    like: jax.Array,
    also_like: jax.Array | None = None,
) -> jax.Array:
    """`lax.fori_loop` whose carry varies over the mesh axes of the arrays that it reads."""
    axes = compat.varying_axes(like)
    if also_like is not None:
        axes |= compat.varying_axes(also_like)
    return lax.fori_loop(0, count, body, compat.vary_over(initial, axes))
