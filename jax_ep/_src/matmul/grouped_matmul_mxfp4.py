"""grouped_matmul of float rows and constant MXFP4 weights, which `WeightsOnly` describes.

* grouped_matmul_mxfp4: lhs, rhs, rhs_scales, group_sizes -> out
* grouped_matmul_mxfp4_lhs_gradient: out_gradient, rhs, rhs_scales, group_sizes -> lhs_gradient

The kernels expand four bits to bfloat16 in registers, so no float matrix is in memory. Weights are
exact in bfloat16; results are those of the bfloat16 matmul of dequantized weights, but for the
order of sums.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._src.core import compat, primitive
from jax_ep._src.core.compat import Aval
from jax_ep._src.matmul import reference
from jax_ep._src.matmul.grouped_matmul_quantized import unsupported_gpus
from jax_ep._src.matmul.params import GroupedMatmulParams
from jax_ep._src.matmul.primitives import bind_matmul
from jax_ep._src.quant.formats import Format, row_scales
from jax_ep._src.quant.microscaling import MxFp4
from jax_ep._src.quant.quantize import dequantize
from jax_ep._src.quant.quantized import Quantized, as_bits, from_bits


def weights_only_matmul(
    lhs: jax.Array, rhs: Quantized, group_sizes: jax.Array, params: GroupedMatmulParams
) -> jax.Array:
    """Returns lhs [M, K] times each group's matrix of rhs [G, N, K].

    The derivative is that for lhs; rhs is a constant.
    """
    params = dataclasses.replace(params, transpose_rhs=True)
    return _matmul(lhs, rhs, group_sizes, params, jnp.dtype(lhs.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _matmul(
    lhs: jax.Array,
    rhs: Quantized,
    group_sizes: jax.Array,
    params: GroupedMatmulParams,
    row_dtype: Any,
) -> jax.Array:
    out, _ = _forward(lhs, rhs, group_sizes, params, row_dtype)
    return out


def _forward(
    lhs: jax.Array,
    rhs: Quantized,
    group_sizes: jax.Array,
    params: GroupedMatmulParams,
    row_dtype: Any,
) -> Any:
    operands = (lhs, rhs.values, rhs.scales, group_sizes)
    (out,) = grouped_matmul_mxfp4_p.bind(*operands, params=params, format=rhs.format)
    return out, as_bits((rhs, group_sizes))


def _backward(
    params: GroupedMatmulParams, row_dtype: Any, residuals: Any, out_bar: jax.Array
) -> Any:
    rhs, group_sizes = from_bits(residuals)
    to_lhs = dataclasses.replace(params, out_dtype=row_dtype)
    lhs_bar = weights_only_lhs_gradient(out_bar.astype(row_dtype), rhs, group_sizes, to_lhs)
    return lhs_bar, None, None


_matmul.defvjp(_forward, _backward)


def weights_only_lhs_gradient(
    out_bar: jax.Array, rhs: Quantized, group_sizes: jax.Array, params: GroupedMatmulParams
) -> jax.Array:
    """Returns out_bar [M, N] times each group's matrix of rhs [G, N, K]. It has no derivative."""
    params = dataclasses.replace(params, transpose_rhs=False)
    operands = (out_bar, rhs.values, rhs.scales, group_sizes)
    (lhs_bar,) = grouped_matmul_mxfp4_lhs_gradient_p.bind(
        *operands, params=params, format=rhs.format
    )
    return lhs_bar


# ---- the primitives


def _avals(
    lhs: Aval,
    rhs: Aval,
    rhs_scales: Aval,
    group_sizes: Aval,
    *,
    params: GroupedMatmulParams,
    format: Format,
) -> list[Aval]:
    num_columns = rhs.shape[1 if params.transpose_rhs else 2]
    return [compat.aval_like(lhs, (lhs.shape[0], num_columns), params.out_dtype)]


def _reference(
    *operands: jax.Array, params: GroupedMatmulParams, format: Format
) -> tuple[jax.Array]:
    """Multiplies by the dequantized weights, in lhs's dtype."""
    return reference.grouped_matmul(*_dequantized(operands, format), params=params)


def _by_float_kernel(
    *operands: jax.Array, params: GroupedMatmulParams, format: Format
) -> tuple[jax.Array]:
    """Dequantizes the weights to lhs's dtype, and multiplies by its kernel."""
    return (bind_matmul(*_dequantized(operands, format), params),)


def _dequantized(
    operands: tuple[jax.Array, ...], format: Format
) -> tuple[jax.Array, jax.Array, jax.Array]:
    lhs, rhs, rhs_scales, group_sizes = operands
    return lhs, dequantize(Quantized(rhs, rhs_scales, format), lhs.dtype), group_sizes


def _attributes(avals: list[Aval], params: GroupedMatmulParams, format: Format) -> dict[str, Any]:
    return {"zero_tail": np.bool_(params.zero_tail), "num_sms": np.int64(params.num_sms)}


def _unsupported(avals: list[Aval], params: GroupedMatmulParams, format: Format) -> str | None:
    return unsupported_gpus("four-bit weights") or unsupported_operands(avals, format)


def unsupported_operands(
    avals: list[Aval], format: Format, columns: int | None = None
) -> str | None:
    """Why the kernels do not take these, or None. `columns`: those of an activation, if not N."""
    lhs, rhs, rhs_scales, group_sizes = avals
    if not isinstance(format, MxFp4):
        return f"no kernel multiplies float rows by {format}"
    if lhs.dtype != jnp.bfloat16:
        return f"rows are {lhs.dtype}; the MXFP4 kernel takes bfloat16"
    (m, _), (_, n, k), (groups,) = lhs.shape, rhs.shape, group_sizes.shape
    outputs = ("N", n, 8) if columns is None else ("F", columns, 8)
    for name, size, multiple in ("K", k, format.block), outputs:
        if size % multiple or size == 0:
            return f"{name} is {size}; the MXFP4 kernel takes positive multiples of {multiple}"
    expected = row_scales(format, rhs.shape)
    if rhs_scales.shape != expected:
        return f"scales have shape {rhs_scales.shape}; the MXFP4 kernel takes {expected}"
    return primitive.too_many(num_rows=m, num_groups=groups, matrix_size=max(k, n))


grouped_matmul_mxfp4_p = primitive.define_primitive(
    "grouped_matmul_mxfp4",
    abstract_eval=_avals,
    reference=_reference,
    attributes=_attributes,
    unsupported=_unsupported,
    fallback=primitive.Fallback("dequantizes its weights on CUDA", _by_float_kernel),
)

grouped_matmul_mxfp4_lhs_gradient_p = primitive.define_primitive(
    "grouped_matmul_mxfp4_lhs_gradient",
    abstract_eval=_avals,
    reference=_reference,
    attributes=_attributes,
    unsupported=_unsupported,
    fallback=primitive.Fallback("dequantizes its weights on CUDA", _by_float_kernel),
)
