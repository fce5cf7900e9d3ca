"""grouped_matmul of two quantized operands.

8-bit tensor core instructions read both operands along K, so the primitive takes rhs as [G, N, K].
XLA gives a transposed rhs that layout where it is computed, or copies it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._src.core import checks, compat, primitive, runtime
from jax_ep._src.core.compat import Aval
from jax_ep._src.core.errors import DtypeError
from jax_ep._src.matmul import reference
from jax_ep._src.matmul.params import GroupedMatmulParams
from jax_ep._src.matmul.primitives import bind_matmul
from jax_ep._src.quant.formats import Format, has_kernels, matrix_scales, row_scales
from jax_ep._src.quant.quantize import dequantize_checked, without_derivative
from jax_ep._src.quant.quantized import Quantized, check, with_tensor_scale

OPERATION = "grouped_matmul"
KERNEL_CAPABILITY = "{}.{}".format(*divmod(runtime.LIMITS["eight_bit_capability"], 10))
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
        transpose_rhs=True,
        out_dtype=_out_dtype(preferred_element_type),
        zero_tail=zero_tail,
        num_sms=checks.num_sms(OPERATION, num_sms),
        implementation=checks.implementation(OPERATION, implementation),
    )
    rhs = rhs if transpose_rhs else rhs.mT

    def bind(lhs: Quantized, rhs: Quantized, group_sizes: jax.Array) -> jax.Array:
        return bind_quantized(lhs, rhs, group_sizes, params)

    lhs, rhs, group_sizes = compat.vary_together((lhs, rhs, group_sizes))
    with jax.named_scope("jax_ep.grouped_matmul"):
        return without_derivative(OPERATION, bind, lhs, rhs, group_sizes)


def bind_quantized(
    lhs: Quantized, rhs: Quantized, group_sizes: jax.Array, params: GroupedMatmulParams
) -> jax.Array:
    """Binds the primitive, with rhs [G, N, K], in a derivative rule of its own or without one."""
    lhs_scales, rhs_scales = map(_scales, (lhs, rhs))
    operands = (lhs.values, lhs_scales, rhs.values, rhs_scales, group_sizes)
    params = dataclasses.replace(params, transpose_rhs=True)
    (out,) = grouped_matmul_quantized_p.bind(
        *operands, params=params, formats=(lhs.format, rhs.format)
    )
    return out


def _scales(x: Quantized) -> jax.Array:
    return x.scales if x.tensor_scale is None else with_tensor_scale(x.scales, x.tensor_scale)


def _out_dtype(preferred_element_type: Any) -> Any:
    given = jnp.bfloat16 if preferred_element_type is None else preferred_element_type
    dtype = checks.dtype(OPERATION, "preferred_element_type", given)
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
    return [compat.aval_like(lhs, (lhs.shape[0], rhs.shape[1]), params.out_dtype)]


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
        dequantize_checked(Quantized(lhs, lhs_scales, formats[0]), dtype),
        dequantize_checked(Quantized(rhs, rhs_scales, formats[1]), dtype),
        group_sizes,
    )


def _attributes(avals: list[Aval], params: GroupedMatmulParams, formats: Formats) -> dict[str, Any]:
    return {
        "scale_block": np.int64(formats[0].block or 0),
        "zero_tail": np.bool_(params.zero_tail),
        "num_sms": np.int64(params.num_sms),
    }


def _unsupported(avals: list[Aval], params: GroupedMatmulParams, formats: Formats) -> str | None:
    return unsupported_operands(avals, formats)


def unsupported_operands(avals: list[Aval], formats: Formats) -> str | None:
    """Returns why no kernel multiplies lhs, lhs_scales, rhs, rhs_scales by group_sizes, or None."""
    return (
        unsupported_gpus() or _unsupported_formats(formats) or _unsupported_shapes(avals, formats)
    )


def unsupported_gpus(operands: str = "eight-bit operands") -> str | None:
    """Returns why the GPUs of this machine do not multiply such operands, or None."""
    others = [c for c in runtime.compute_capabilities() if c != KERNEL_CAPABILITY]
    if not others:
        return None
    return (
        f"{operands} need GPUs of compute capability {KERNEL_CAPABILITY}, and there is "
        f"one of {others[0]}"
    )


def _unsupported_formats(formats: Formats) -> str | None:
    lhs, rhs = formats
    are_alike = lhs.matrix_block == rhs.matrix_block
    if are_alike and rhs.dtype == jnp.float8_e4m3fn and all(map(has_kernels, formats)):
        return None
    return f"no kernel multiplies {lhs} by {rhs}"


def _unsupported_shapes(avals: list[Aval], formats: Formats) -> str | None:
    lhs, lhs_scales, rhs, rhs_scales, group_sizes = (aval.shape for aval in avals)
    (m, k), (_, n, _), (groups,) = lhs, rhs, group_sizes
    for name, size, multiple in ("K", k, 16), ("N", n, 8):
        if size % multiple or size == 0:
            return f"{name} is {size}; the FP8 kernels take positive multiples of {multiple}"
    expected = row_scales(formats[0], lhs), matrix_scales(formats[1], rhs)
    if (lhs_scales, rhs_scales) != expected:
        return (
            f"scales have shapes {lhs_scales} and {rhs_scales}; the FP8 kernels take {expected[0]} "
            f"and {expected[1]}"
        )
    return primitive.too_many(num_rows=m, num_groups=groups, matrix_size=max(k, n))


grouped_matmul_quantized_p = primitive.define_primitive(
    "grouped_matmul_quantized",
    abstract_eval=_avals,
    reference=_reference,
    attributes=_attributes,
    unsupported=_unsupported,
    fallback=primitive.Fallback("dequantizes its operands to bfloat16 on CUDA", _as_bfloat16),
)
