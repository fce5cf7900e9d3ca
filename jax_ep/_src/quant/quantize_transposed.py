"""Quantizes the rows of groups as gradients of weights read them: transposed, in row blocks.

Eight-bit tensor cores read both operands along the sum's axis, which in a gradient of weights is a
group's rows. A row block has up to 128 rows of one group; rows that it lacks are zeros.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._src.core import compat, primitive
from jax_ep._src.core.compat import Aval
from jax_ep._src.quant import reference
from jax_ep._src.quant.formats import BLOCK, Format, Fp8Block128, num_blocks
from jax_ep._src.quant.quantize import dequantize, scale_attributes, unsupported_floats
from jax_ep._src.quant.quantized import Quantized


@dataclasses.dataclass(frozen=True)
class QuantizeTransposedParams:
    """Parameters of quantize_transposed; the format is beside them."""

    implementation: str | None
    zero_tail: bool = dataclasses.field(default_factory=compat.looks_for_nan)


class Transposed(NamedTuple):
    """The rows of groups as gradients of weights read them, in row blocks."""

    values: jax.Array  # [B, C, 128]
    scales: jax.Array  # [B, C], or [B, ceil(C / 128)]


def transposed_format(format: Format) -> Format:
    """Returns the format of row blocks: E4M3 in blocks, with the other properties of `format`."""
    return Fp8Block128(format.scale_rounding, format.min_amax)


def bind_quantize_transposed(
    x: jax.Array | Quantized,
    first_rows: jax.Array,
    num_rows: jax.Array,
    format: Format,
    *,
    per_column: bool,
    implementation: str | None,
) -> Transposed:
    """Binds the primitive, in a derivative rule.

    Args:
      x: float[M, C], or quantized rows: with scales of powers of two on both sides only what
        becomes subnormal is rounded once more.
      first_rows: int32[B], the first row of each block in x.
      num_rows: int32[B], up to 128 of them. Blocks without rows are unspecified.
      format: a format of blocks of 128.
      per_column: whether each column of a row block has a scale. Otherwise 128 columns share one.
      implementation: as in `quantize`.

    Returns:
      values [B, C, 128], and scales [B, C] or [B, ceil(C / 128)].
    """
    if isinstance(x, Quantized) and x.format.dtype != format.dtype:
        x = dequantize(x, jnp.float32)
    rows = (x.values, x.scales) if isinstance(x, Quantized) else (x,)
    transposed = quantize_transposed_p.bind(
        *rows,
        first_rows,
        num_rows,
        params=QuantizeTransposedParams(implementation),
        format=format,
        per_column=per_column,
    )
    return Transposed(*transposed)


def transposed_shapes(
    row_blocks: int, columns: int, per_column: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of values and scales."""
    scales = columns if per_column else num_blocks(columns, BLOCK)
    return (row_blocks, columns, BLOCK), (row_blocks, scales)


def _avals(
    x: Aval,
    *others: Aval,  # [x_scales], first_rows, num_rows
    params: QuantizeTransposedParams,
    format: Format,
    per_column: bool,
) -> list[Aval]:
    values, scales = transposed_shapes(others[-1].shape[0], x.shape[1], per_column)
    return [
        compat.aval_like(x, values, format.dtype),
        compat.aval_like(x, scales, format.scale_dtype),
    ]


def _reference(
    x: jax.Array,
    *others: jax.Array,
    params: QuantizeTransposedParams,
    format: Format,
    per_column: bool,
) -> tuple[jax.Array, ...]:
    *x_scales, first_rows, num_rows = others
    return transposed_reference(x, x_scales, first_rows, num_rows, format, per_column)


def transposed_reference(
    x: jax.Array,
    x_scales: Sequence[jax.Array],
    first_rows: jax.Array,
    num_rows: jax.Array,
    format: Format,
    per_column: bool,
) -> tuple[jax.Array, jax.Array]:
    """The same in plain JAX, of x with its scales if it is quantized."""
    index = jnp.arange(BLOCK)

    def of_blocks(rows: jax.Array) -> jax.Array:
        return jnp.take(rows, first_rows[:, None] + index, axis=0, mode="clip")

    rows = of_blocks(x)
    for scales in x_scales:
        block = BLOCK if scales.shape[1] > 1 else x.shape[1]
        scales = reference.expanded(of_blocks(scales), rows.shape, (1, 1, block))
        rows = rows.astype(jnp.float32) * scales
    rows = jnp.where((index < num_rows[:, None])[..., None], rows, 0)
    blocks = reference.quantized(rows.mT, format, (1, 1 if per_column else BLOCK, BLOCK))
    return blocks.values, blocks.scales[..., 0]


def _attributes(
    avals: list[Aval], params: QuantizeTransposedParams, format: Format, per_column: bool
) -> dict[str, Any]:
    return {
        "is_quantized": np.bool_(len(avals) == 4),
        "per_column": np.bool_(per_column),
        "zero_tail": np.bool_(params.zero_tail),
        **scale_attributes(format),
    }


def unsupported_row_blocks(avals: list[Aval], **_: Any) -> str | None:
    """Why the kernels do not quantize these rows, float ones or with scales, or None."""
    x, *_scales, _first_rows, num_rows = avals
    reason = None if len(avals) == 4 else unsupported_floats("x", x)
    return reason or primitive.too_many(
        num_rows=x.shape[0], row_size=x.shape[1], row_blocks=num_rows.shape[0]
    )


quantize_transposed_p = primitive.define_primitive(
    "quantize_transposed",
    abstract_eval=_avals,
    reference=_reference,
    attributes=_attributes,
    unsupported=unsupported_row_blocks,
)
