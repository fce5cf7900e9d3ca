"""Adafactor (arXiv:1804.04235) without momentum, for parameters of bfloat16.

Its state for a matrix is one float32 number per row and one per column. So 6.9 billion parameters
take 13.8 GB, their gradients as much, and the state 10 MB: 28 GB of an H200's 141, where AdamW's
two float32 moments alone would take 55 GB.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

TINY = 1e-30


class Moments(NamedTuple):
    """The second moments of a parameter: means over columns and over rows, or of each number."""

    rows: jax.Array  # [..., R] of a matrix [..., R, C]; of other parameters their shape
    columns: jax.Array  # [..., C]; empty for other parameters


def initialize(params: Any) -> Any:
    """Returns the moments of all parameters."""
    return jax.tree.map(_zeros, params)


def _zeros(param: jax.Array) -> Moments:
    if param.ndim < 2:
        return Moments(jnp.zeros(param.shape, jnp.float32), jnp.zeros(0, jnp.float32))
    columns = (*param.shape[:-2], param.shape[-1])
    return Moments(jnp.zeros(param.shape[:-1], jnp.float32), jnp.zeros(columns, jnp.float32))


def update(params: Any, gradients: Any, state: Any, step: jax.Array, rate: jax.Array) -> Any:
    """Returns the parameters and the state after a step, counted from 0."""
    decay = 1 - (step + 1.0) ** -0.8

    def one(param: jax.Array, gradient: jax.Array, moments: Moments) -> tuple[Any, Moments]:
        gradient = gradient.astype(jnp.float32)
        square = gradient * gradient + TINY
        if param.ndim < 2:
            rows, columns = decay * moments.rows + (1 - decay) * square, moments.columns
            scale = jax.lax.rsqrt(rows)
        else:
            rows = decay * moments.rows + (1 - decay) * square.mean(-1)
            columns = decay * moments.columns + (1 - decay) * square.mean(-2)
            of_rows = jax.lax.rsqrt(rows / rows.mean(-1, keepdims=True))
            scale = of_rows[..., None] * jax.lax.rsqrt(columns)[..., None, :]
        changed = param.astype(jnp.float32) - rate * gradient * scale
        return changed.astype(param.dtype), Moments(rows, columns)

    pairs = jax.tree.map(one, params, gradients, state)
    new = [jax.tree.map(lambda _, pair, i=i: pair[i], params, pairs) for i in (0, 1)]
    return new[0], new[1]
