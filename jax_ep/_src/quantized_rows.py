"""Quantized rows as transfers move them: a row's values, then its scales, in one row of bytes.

Transfers copy rows bit by bit. A row of padding is zeros, values and scales.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jax_ep._src import checks
from jax_ep._src.errors import ArgumentError
from jax_ep._src.quantize import num_scales, quantize_packed, without_derivative
from jax_ep._src.quantized import Format, Quantized, check
from jax_ep._src.reference import packed_rows as reference
from jax_ep._src.runtime import LIMITS


@dataclasses.dataclass(frozen=True)
class ToQuantize:
    """Rows that are quantized as they are packed, in one pass."""

    x: jax.Array
    format: Format
    implementation: str | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rows."""
        return self.x.shape


type Rows = jax.Array | Quantized | ToQuantize
"""The rows that a transfer is given."""


def pack(operation: str, x: Rows, num_tokens: int | str) -> jax.Array:
    """Returns the rows that are sent: x itself, or opaque ones if they are quantized.

    Raises unless x is [num_tokens, hidden]. A name in place of the number stands for any.
    """
    if isinstance(x, ToQuantize):
        rows = pack(operation, x.x, num_tokens)
        return quantize_packed(operation, rows, x.format, x.implementation)
    if not isinstance(x, Quantized):
        checks.rows(operation, "x", x, (num_tokens, "hidden"))
        return x
    check(operation, x)
    expected = (x.shape[0] if isinstance(num_tokens, str) else num_tokens, num_scales(x, x.format))
    if x.ndim != 2 or x.shape[0] != expected[0] or x.scales.shape != expected:
        raise ArgumentError(
            f"jax_ep.{operation}: x is quantized, with values of shape {x.shape} and scales of "
            f"shape {x.scales.shape}; expected [{num_tokens}, hidden] and {expected}. Quantize "
            "rows by jax_ep.quant.quantize."
        )
    return without_derivative(operation, reference.pack, x)


def unpack(rows: jax.Array, x: Rows) -> jax.Array | Quantized:
    """Returns the rows that have arrived, quantized if x is or was to be."""
    if not isinstance(x, Quantized | ToQuantize):
        return rows
    return reference.unpack(rows, x.shape[1], num_scales(x, x.format), x.format)


def without_opaque(rows_bar: jax.Array) -> tuple[jax.Array, bool]:
    """Returns the cotangent of rows, zeros of the least size for opaque ones, and which it is."""
    if rows_bar.dtype != jax.dtypes.float0:
        return rows_bar, False
    return jnp.zeros((rows_bar.shape[0], LIMITS["vector_bytes"] // 4), jnp.float32), True
