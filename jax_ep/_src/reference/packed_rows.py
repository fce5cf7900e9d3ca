"""Packing quantized rows, and unpacking them, in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep._src.primitive import OPAQUE
from jax_ep._src.quantized import Format, Quantized
from jax_ep._src.runtime import LIMITS


def row_bytes(hidden: int, num_scales: int) -> int:
    """Returns the bytes of a row in flight. Scales begin at a multiple of four bytes."""
    vector, word = LIMITS["vector_bytes"], OPAQUE.itemsize
    return -(-(-(-hidden // word) + num_scales) * word // vector) * vector


def pack(x: Quantized) -> jax.Array:
    """Returns OPAQUE[..., bytes / 4]."""
    *leading, hidden = x.shape
    values, scales = (lax.bitcast_convert_type(a, jnp.uint8) for a in (x.values, x.scales))
    values = _padded(values, -hidden % OPAQUE.itemsize)
    rows = jnp.concatenate([values, scales.reshape(*leading, -1)], axis=-1)
    rows = _padded(rows, row_bytes(hidden, x.scales.shape[-1]) - rows.shape[-1])
    return lax.bitcast_convert_type(rows.reshape(*leading, -1, OPAQUE.itemsize), OPAQUE)


def _padded(x: jax.Array, padding: int) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])


def unpack(rows: jax.Array, hidden: int, num_scales: int, format: Format) -> Quantized:
    """Returns the rows that were packed."""
    num_rows = rows.shape[0]
    num_words = -(-hidden // OPAQUE.itemsize)
    # Words are copied in fewer steps than bytes.
    values, scales = jnp.split(rows[:, : num_words + num_scales], [num_words], axis=1)
    values = lax.bitcast_convert_type(values, format.dtype).reshape(num_rows, -1)[:, :hidden]
    return Quantized(values, lax.bitcast_convert_type(scales, jnp.float32), format)
