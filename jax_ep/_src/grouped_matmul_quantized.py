"""grouped_matmul of two quantized operands."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_ep._src import checks, compat, primitive
from jax_ep._src.compat import Aval
from jax_ep._src.errors import DtypeError
from jax_ep._src.grouped_matmul import bind_matmul
from jax_ep._src.params import GroupedMatmulParams
from jax_ep._src.quantize import dequantize, without_derivative
from jax_ep._src.quantized import Format, Quantized, check
from jax_ep._src.reference import matmul as reference

OPERATION = "grouped_matmul"
Formats = tuple[Format, Format]


def grouped_matmul_quantized(
    lhs: Any,
    rhs: Any,
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool,
    preferred_element_type: Any,
    zero_tail: bool,
    num_sms: int | None,
    implementation: str | None,
) -> jax.Array:
    """Called by `grouped_matmul` if an operand is quantized; its docstring describes both."""
    if not (isinstance(lhs, Quantized) and isinstance(rhs, Quantized)):
        raise DtypeError(
            f"jax_ep.{OPERATION}: lhs is a {type(lhs).__name__} and rhs a {type(rhs).__name__}; "
            "expected both quantized, or neither. Use jax_ep.quant.dequantize on the one that is."
        )
    group_sizes = checks.group_sizes(OPERATION, group_sizes)
    checks.shape(OPERATION, "lhs", lhs.values, ("rows", "K"))
    matrix = ("N", lhs.shape[1]) if transpose_rhs else (lhs.shape[1], "N")
    checks.shape(OPERATION, "rhs", rhs.values, (group_sizes.shape[0], *matrix))
    for operand in lhs, rhs:
        check(OPERATION, operand)
    params = GroupedMatmulParams(
        transpose_rhs=transpose_rhs,
        out_dtype=_out_dtype(preferred_element_type),
        zero_tail=zero_tail,
        num_sms=checks.num_sms(OPERATION, num_sms),
        implementation=checks.implementation(OPERATION, implementation),
    )
    formats = (lhs.format, rhs.format)

    def bind(*operands: jax.Array) -> jax.Array:
        (out,) = grouped_matmul_quantized_p.bind(*operands, params=params, formats=formats)
        return out

    lhs, rhs, group_sizes = compat.vary_together((lhs, rhs, group_sizes))
    operands = (lhs.values, lhs.scales, rhs.values, rhs.scales, group_sizes)
    with jax.named_scope("jax_ep.grouped_matmul"):
        return without_derivative(OPERATION, bind, *operands)


def _out_dtype(preferred_element_type: Any) -> Any:
    dtype = jnp.dtype(jnp.bfloat16 if preferred_element_type is None else preferred_element_type)
    if dtype not in (jnp.bfloat16, jnp.float32):
        raise DtypeError(
            f"jax_ep.{OPERATION}: preferred_element_type={dtype} with quantized operands; "
            "expected bfloat16 or float32. Cast the result instead."
        )
    return dtype


# ---- the primitive


def _avals(
    lhs: Aval,
    lhs_scales: Aval,
    rhs: Aval,
    rhs_scales: Aval,
    group_sizes: Aval,
    *,
    params: GroupedMatmulParams,
    formats: Formats,
) -> list[Aval]:
    num_columns = rhs.shape[1 if params.transpose_rhs else 2]
    return [compat.aval_like(lhs, (lhs.shape[0], num_columns), params.out_dtype)]


def _reference(
    *operands: jax.Array, params: GroupedMatmulParams, formats: Formats
) -> tuple[jax.Array]:
    """Multiplies the dequantized operands in float32."""
    return reference.grouped_matmul(*_dequantized(operands, formats, jnp.float32), params=params)


def _as_bfloat16(
    *operands: jax.Array, params: GroupedMatmulParams, formats: Formats
) -> tuple[jax.Array]:
    """Rounds the dequantized operands to bfloat16, and multiplies them by its kernel."""
    return (bind_matmul(*_dequantized(operands, formats, jnp.bfloat16), params),)


def _dequantized(
    operands: tuple[jax.Array, ...], formats: Formats, dtype: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    lhs, lhs_scales, rhs, rhs_scales, group_sizes = operands
    return (
        dequantize(Quantized(lhs, lhs_scales, formats[0]), dtype),
        dequantize(Quantized(rhs, rhs_scales, formats[1]), dtype),
        group_sizes,
    )


def _unsupported(avals: list[Aval], params: GroupedMatmulParams, formats: Formats) -> str:
    return "no kernel takes eight-bit operands"


grouped_matmul_quantized_p = primitive.define_primitive(
    "grouped_matmul_quantized",
    abstract_eval=_avals,
    reference=_reference,
    attributes=None,
    unsupported=_unsupported,
    fallback=primitive.Fallback("dequantizes its operands to bfloat16 on CUDA", _as_bfloat16),
)
