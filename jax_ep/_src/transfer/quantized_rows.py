"""Quantized rows as operands and results of transfers: two arrays, which travel in one row."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_ep._src.core import checks, compat
from jax_ep._src.core.errors import ArgumentError
from jax_ep._src.core.expert_axis import ExpertAxis
from jax_ep._src.core.runtime import LIMITS
from jax_ep._src.quant.quantize import num_scales, without_derivative
from jax_ep._src.quant.quantized import Quantized, as_bits, check
from jax_ep._src.transfer.primitives import Rows


def check_rows(operation: str, x: Rows, num_tokens: int | str, axis: ExpertAxis) -> Rows:
    """Returns the rows to send; the bits of quantized ones, which have no derivative.

    Raises unless x is [num_tokens, hidden]. A name in place of the number stands for any.
    """
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
    if x.tensor_scale is not None and compat.varying_axes(x.tensor_scale) & {*axis.names}:
        raise ArgumentError(
            f"jax_ep.{operation}: x is quantized by a tensor_scale that differs between the ranks "
            f"of {axis.name!r}; expected one for all, as rows of several ranks share the result's. "
            "Give the same to jax_ep.quant.quantize on all ranks, such as a jax.lax.pmax of theirs."
        )
    bits: Quantized = without_derivative(operation, as_bits, x)
    return bits


def cotangent(rows_bar: Rows) -> tuple[jax.Array, bool]:
    """Returns the cotangent of rows, zeros of the least size for quantized ones, and which."""
    if not isinstance(rows_bar, Quantized):
        return rows_bar, False
    return jnp.zeros((rows_bar.shape[0], LIMITS["vector_bytes"] // 4), jnp.float32), True
