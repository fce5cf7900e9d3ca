"""Quantized rows as transfers move them: a row's values, then its scales, in one row of bytes.

Transfers copy rows bit by bit. A row of padding is zeros, values and scales.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep._src import checks
from jax_ep._src.errors import ArgumentError
from jax_ep._src.plan import Dispatched
from jax_ep._src.primitive import OPAQUE
from jax_ep._src.quantize import without_derivative
from jax_ep._src.quantized import BLOCK, Fp8Block128, Quantized, check
from jax_ep._src.runtime import LIMITS


def send_quantized(
    operation: str, x: Quantized, send: Callable[[jax.Array], Dispatched]
) -> Dispatched:
    """Sends packed rows, and returns the received ones unpacked."""
    check(operation, x)
    expected = (x.shape[0], _num_scales(x))
    if x.ndim != 2 or x.scales.shape != expected:
        raise ArgumentError(
            f"jax_ep.{operation}: x is quantized, with values of shape {x.shape} and scales of "
            f"shape {x.scales.shape}; expected [tokens, hidden] and {expected}. Quantize rows by "
            "jax_ep.quant.quantize."
        )
    dispatched = send(without_derivative(operation, _pack, x))
    return dataclasses.replace(dispatched, rows=_unpack(dispatched.rows, x))


def check_rows(operation: str, x: jax.Array, shape: tuple[int | str, ...]) -> None:
    """Raises unless x may be sent. Opaque rows come from `send_quantized` alone, inside jax_ep."""
    if getattr(x, "dtype", None) != OPAQUE:
        checks.rows(operation, "x", x, shape)


def without_opaque(rows_bar: jax.Array) -> tuple[jax.Array, bool]:
    """Returns the cotangent of rows, zeros of the least size for opaque ones, and which it is."""
    if rows_bar.dtype != jax.dtypes.float0:
        return rows_bar, False
    return jnp.zeros((rows_bar.shape[0], LIMITS["vector_bytes"] // 4), jnp.float32), True


def row_bytes(hidden: int, num_scales: int) -> int:
    """Returns the bytes of a row in flight."""
    vector = LIMITS["vector_bytes"]
    return -(-(hidden + 4 * num_scales) // vector) * vector


def _num_scales(x: Quantized) -> int:
    return -(-x.shape[-1] // BLOCK) if isinstance(x.format, Fp8Block128) else 1


def _pack(x: Quantized) -> jax.Array:
    """Returns OPAQUE[T, bytes / 4]."""
    num_tokens, hidden = x.shape
    values, scales = (lax.bitcast_convert_type(a, jnp.uint8) for a in (x.values, x.scales))
    rows = jnp.concatenate([values, scales.reshape(num_tokens, -1)], axis=1)
    padding = row_bytes(hidden, x.scales.shape[1]) - rows.shape[1]
    rows = jnp.pad(rows, ((0, 0), (0, padding)))
    return lax.bitcast_convert_type(rows.reshape(num_tokens, -1, OPAQUE.itemsize), OPAQUE)


def _unpack(rows: jax.Array, like: Quantized) -> Quantized:
    num_rows, hidden, num_scales = rows.shape[0], like.shape[1], like.scales.shape[1]
    as_bytes = lax.bitcast_convert_type(rows, jnp.uint8).reshape(num_rows, -1)
    values = lax.bitcast_convert_type(as_bytes[:, :hidden], like.format.dtype)
    scales = as_bytes[:, hidden : hidden + 4 * num_scales].reshape(num_rows, num_scales, 4)
    return Quantized(values, lax.bitcast_convert_type(scales, jnp.float32), like.format)
