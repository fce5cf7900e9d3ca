"""Quantized rows as transfers move them: a row's values, then its scales, in one row of bytes.

Transfers copy rows bit by bit. A row of padding is zeros, values and scales.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep._src import checks
from jax_ep._src.errors import ArgumentError
from jax_ep._src.primitive import OPAQUE
from jax_ep._src.quantize import without_derivative
from jax_ep._src.quantized import BLOCK, Fp8Block128, Quantized, check
from jax_ep._src.runtime import LIMITS


def pack(operation: str, x: jax.Array | Quantized, num_tokens: int | str) -> jax.Array:
    """Returns the rows that are sent: x itself, or opaque ones if it is quantized.

    Raises unless x is [num_tokens, hidden]. A name in place of the number stands for any.
    """
    if not isinstance(x, Quantized):
        checks.rows(operation, "x", x, (num_tokens, "hidden"))
        return x
    check(operation, x)
    expected = (x.shape[0] if isinstance(num_tokens, str) else num_tokens, _num_scales(x))
    if x.ndim != 2 or x.shape[0] != expected[0] or x.scales.shape != expected:
        raise ArgumentError(
            f"jax_ep.{operation}: x is quantized, with values of shape {x.shape} and scales of "
            f"shape {x.scales.shape}; expected [{num_tokens}, hidden] and {expected}. Quantize "
            "rows by jax_ep.quant.quantize."
        )
    return without_derivative(operation, _pack, x)


def unpack(rows: jax.Array, x: jax.Array | Quantized) -> jax.Array | Quantized:
    """Returns the rows that have arrived, in the form of x."""
    return _unpack(rows, x) if isinstance(x, Quantized) else rows


def without_opaque(rows_bar: jax.Array) -> tuple[jax.Array, bool]:
    """Returns the cotangent of rows, zeros of the least size for opaque ones, and which it is."""
    if rows_bar.dtype != jax.dtypes.float0:
        return rows_bar, False
    return jnp.zeros((rows_bar.shape[0], LIMITS["vector_bytes"] // 4), jnp.float32), True


def row_bytes(hidden: int, num_scales: int) -> int:
    """Returns the bytes of a row in flight. Scales begin at a multiple of four bytes."""
    vector, word = LIMITS["vector_bytes"], OPAQUE.itemsize
    return -(-(-(-hidden // word) + num_scales) * word // vector) * vector


def _num_scales(x: Quantized) -> int:
    return -(-x.shape[-1] // BLOCK) if isinstance(x.format, Fp8Block128) else 1


def _pack(x: Quantized) -> jax.Array:
    """Returns OPAQUE[T, bytes / 4]."""
    num_tokens, hidden = x.shape
    values, scales = (lax.bitcast_convert_type(a, jnp.uint8) for a in (x.values, x.scales))
    values = jnp.pad(values, ((0, 0), (0, -hidden % OPAQUE.itemsize)))
    rows = jnp.concatenate([values, scales.reshape(num_tokens, -1)], axis=1)
    padding = row_bytes(hidden, x.scales.shape[1]) - rows.shape[1]
    rows = jnp.pad(rows, ((0, 0), (0, padding)))
    return lax.bitcast_convert_type(rows.reshape(num_tokens, -1, OPAQUE.itemsize), OPAQUE)


def _unpack(rows: jax.Array, like: Quantized) -> Quantized:
    num_rows, hidden, num_scales = rows.shape[0], like.shape[1], like.scales.shape[1]
    num_words = -(-hidden // OPAQUE.itemsize)
    # Words are copied in fewer steps than bytes.
    values, scales = jnp.split(rows[:, : num_words + num_scales], [num_words], axis=1)
    values = lax.bitcast_convert_type(values, like.format.dtype).reshape(num_rows, -1)[:, :hidden]
    return Quantized(values, lax.bitcast_convert_type(scales, jnp.float32), like.format)
