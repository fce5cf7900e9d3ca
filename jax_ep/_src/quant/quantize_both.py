"""Quantizes the rows of groups as gradients of rows and those of weights read them, in one pass.

That is what `quantize` and `quantize_transposed` return in a format of blocks of 128, bit by bit.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from jax_ep._src.core import compat, primitive
from jax_ep._src.core.compat import Aval
from jax_ep._src.quant import reference
from jax_ep._src.quant.formats import BLOCK, Format, row_scales
from jax_ep._src.quant.quantize import QuantizeParams, quantize_p, scale_attributes
from jax_ep._src.quant.quantize_transposed import (
    QuantizeTransposedParams,
    Transposed,
    quantize_transposed_p,
    transposed_format,
    transposed_reference,
    transposed_shapes,
    unsupported_row_blocks,
)
from jax_ep._src.quant.quantized import Quantized


@dataclasses.dataclass(frozen=True)
class QuantizeBothParams:
    """Parameters of quantize_both; the format is beside them."""

    implementation: str | None


def can_quantize_both(format: Format) -> bool:
    """Whether one pass is enough: rows past the last group are not written, which JAX may look at.

    Rows with one scale each are longer than what a thread block holds.
    """
    return transposed_format(format) == format and not compat.looks_for_nan()


def bind_quantize_both(
    x: jax.Array,
    first_rows: jax.Array,
    num_rows: jax.Array,
    format: Format,
    *,
    per_column: bool,
    implementation: str | None,
) -> tuple[Quantized, Transposed]:
    """Binds the primitive, in a derivative rule.

    Args:
      x: float[M, C].
      first_rows: as in `bind_quantize_transposed`.
      num_rows: likewise.
      format: one for which `can_quantize_both`.
      per_column: as in `bind_quantize_transposed`.
      implementation: as in `quantize`.

    Returns:
      Rows [M, C], unspecified past the last group; and what `bind_quantize_transposed` returns.
    """
    values, scales, *transposed = quantize_both_p.bind(
        x,
        first_rows,
        num_rows,
        params=QuantizeBothParams(implementation),
        format=format,
        per_column=per_column,
    )
    return Quantized(values, scales, format), Transposed(*transposed)


def _avals(
    x: Aval,
    first_rows: Aval,
    num_rows: Aval,
    params: QuantizeBothParams,
    format: Format,
    per_column: bool,
) -> list[Aval]:
    values, scales = transposed_shapes(num_rows.shape[0], x.shape[1], per_column)
    return [
        compat.aval_like(x, x.shape, format.dtype),
        compat.aval_like(x, row_scales(format, x.shape), format.scale_dtype),
        compat.aval_like(x, values, format.dtype),
        compat.aval_like(x, scales, format.scale_dtype),
    ]


def _reference(
    x: jax.Array,
    first_rows: jax.Array,
    num_rows: jax.Array,
    params: QuantizeBothParams,
    format: Format,
    per_column: bool,
) -> tuple[jax.Array, ...]:
    rows = reference.quantized(x, format, (1, BLOCK))
    transposed = transposed_reference(x, (), first_rows, num_rows, format, per_column)
    return rows.values, rows.scales, *transposed


def _attributes(
    avals: list[Aval], params: QuantizeBothParams, format: Format, per_column: bool
) -> dict[str, Any]:
    return {"per_column": np.bool_(per_column), **scale_attributes(format)}


def _drop_unused(used: list[bool], eqn: Any) -> tuple[list[bool], Any]:
    """Leaves the pass that is used, where a gradient is not: of frozen weights, or of inputs."""
    with_rows, with_transposed = any(used[:2]), any(used[2:])
    implementation, format = eqn.params["params"].implementation, eqn.params["format"]
    if with_rows and with_transposed:
        return [True] * len(eqn.invars), eqn
    if with_transposed:
        other = eqn.replace(
            primitive=quantize_transposed_p,
            outvars=eqn.outvars[2:],
            params=eqn.params | {"params": QuantizeTransposedParams(implementation)},
        )
        return [True] * len(eqn.invars), other
    if with_rows:
        other = eqn.replace(
            primitive=quantize_p,
            invars=eqn.invars[:1],
            outvars=eqn.outvars[:2],
            params={"params": QuantizeParams(implementation), "format": format},
        )
        return [True, False, False], other
    return [False] * len(eqn.invars), None


quantize_both_p = primitive.define_primitive(
    "quantize_both",
    abstract_eval=_avals,
    reference=_reference,
    attributes=_attributes,
    unsupported=unsupported_row_blocks,
)
compat.define_dead_code_rule(quantize_both_p, _drop_unused)
