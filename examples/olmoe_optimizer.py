"""Adafactor (arXiv:1804.04235) without momentum, for parameters of bfloat16.

The update of each matrix is clipped, as the paper does in its section 6. Parameters of bfloat16 are
rounded stochastically (arXiv:2010.06192): nearest would lose or double small updates.

Its state for a matrix is one float32 number per row and one per column. So 6.9 billion parameters
take 13.8 GB, their gradients as much, and the state 10 MB: 28 GB of an H200's 141, where AdamW's
two float32 moments alone would take 55 GB.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

TINY = 1e-30
CLIP = 1.0  # the largest root mean square of an update, before the rate


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
    counter = itertools.count()  # numbers the parameters, so that each gets bits of its own

    def one(param: jax.Array, gradient: jax.Array, moments: Moments) -> tuple[Any, Moments]:
        gradient = gradient.astype(jnp.float32)
        square = gradient * gradient + TINY
        if param.ndim < 2:
            rows, columns = decay * moments.rows + (1 - decay) * square, moments.columns
            scale = jax.lax.rsqrt(rows) / clip((square / rows).mean())
        else:
            rows = decay * moments.rows + (1 - decay) * square.mean(-1)
            columns = decay * moments.columns + (1 - decay) * square.mean(-2)
            of_rows = jax.lax.rsqrt(rows / rows.mean(-1, keepdims=True))
            # Shares no matrix with the update below: XLA would store that one in float32.
            squares = of_rows**2 * (square * (1 / columns)[..., None, :]).mean(-1)
            of_rows = of_rows / clip(squares.mean(-1, keepdims=True))
            scale = of_rows[..., None] * jax.lax.rsqrt(columns)[..., None, :]
        changed = param.astype(jnp.float32) - rate * gradient * scale
        seed = mix(jnp.uint32(step)) + jnp.uint32(next(counter))
        if param.dtype == jnp.bfloat16:
            changed = round_stochastically(changed, seed)
        return changed.astype(param.dtype), Moments(rows, columns)

    pairs = jax.tree.map(one, params, gradients, state)
    new = [jax.tree.map(lambda _, pair, i=i: pair[i], params, pairs) for i in (0, 1)]
    return new[0], new[1]


def clip(mean_square: jax.Array) -> jax.Array:
    """Returns the divisor of an update with this mean square."""
    return jnp.maximum(1.0, jnp.sqrt(mean_square) / CLIP)


def round_stochastically(values: jax.Array, seed: jax.Array) -> jax.Array:
    """Rounds float32 to bfloat16, up or down with odds that make the mean exact.

    Its bits are a hash of index and seed, so the rounding fuses into what computes the values:
    arrays of jax.random would take gigabytes.
    """
    index = jnp.zeros(values.shape, jnp.uint32)
    for axis, size in enumerate(values.shape):  # may wrap beyond 2^32 elements
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, values.shape, axis)
    noise = mix(index ^ mix(seed)) >> 16
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32) + noise
    rounded = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
    # The sum could carry a NaN into a number.
    return jnp.where(jnp.isfinite(values), rounded, values).astype(jnp.bfloat16)


def mix(bits: jax.Array) -> jax.Array:
    """Returns murmur3's 32-bit finalizer of each number."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)
