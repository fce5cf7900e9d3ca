"""The two plain grouped-matmul primitives, how they are bound, and the derivative of their product.

* grouped_matmul: lhs, rhs, group_sizes -> out
* grouped_matmul_rhs_gradient: lhs, out_gradient, group_sizes, [accumulator] -> rhs_gradient
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
from jax_ep._src.matmul.accumulation import Accumulation, pass_on
from jax_ep._src.matmul.params import GroupedMatmulParams

CAST_ROWS = 64
"""Average rows per group above which a float32 matrix is cast before the product."""


# ---- abstract evaluation


def _grouped_matmul_avals(
    lhs: Aval, rhs: Aval, group_sizes: Aval, *, params: GroupedMatmulParams
) -> list[Aval]:
    num_columns = rhs.shape[1 if params.transpose_rhs else 2]
    return [compat.aval_like(lhs, (lhs.shape[0], num_columns), params.out_dtype)]


def _rhs_gradient_avals(
    lhs: Aval,
    out_bar: Aval,
    group_sizes: Aval,
    *accumulator: Aval,
    params: GroupedMatmulParams,
    has_accumulator: bool,
) -> list[Aval]:
    matrix = (lhs.shape[1], out_bar.shape[1])
    shape = (group_sizes.shape[0], *(matrix[::-1] if params.transpose_rhs else matrix))
    result = compat.aval_like(lhs, shape, params.out_dtype)
    assert all(a.shape == shape and a.dtype == result.dtype == jnp.float32 for a in accumulator)
    return [result]


# ---- lowering


def _attributes(avals: list[Aval], params: GroupedMatmulParams) -> dict[str, Any]:
    return {
        "transpose_rhs": np.bool_(params.transpose_rhs),
        "zero_tail": np.bool_(params.zero_tail),
        "num_sms": np.int64(params.num_sms),
    }


def _rhs_gradient_attributes(
    avals: list[Aval], params: GroupedMatmulParams, has_accumulator: bool
) -> dict[str, Any]:
    return {
        "transpose_rhs": np.bool_(params.transpose_rhs),
        "has_accumulator": np.bool_(has_accumulator),
        "num_sms": np.int64(params.num_sms),
    }


def _rhs_gradient_aliases(params: GroupedMatmulParams, has_accumulator: bool) -> dict[int, int]:
    return {3: 0} if has_accumulator else {}


def _unsupported(avals: list[Aval], params: GroupedMatmulParams, **_: bool) -> str | None:
    lhs, other, group_sizes = (aval.shape for aval in avals[:3])
    return primitive.too_many(
        num_rows=lhs[0], num_groups=group_sizes[0], matrix_size=max(lhs[1], *other[1:])
    )


grouped_matmul_p = primitive.define_primitive(
    "grouped_matmul",
    abstract_eval=_grouped_matmul_avals,
    reference=reference.grouped_matmul,
    attributes=_attributes,
    unsupported=_unsupported,
)

grouped_matmul_rhs_gradient_p = primitive.define_primitive(
    "grouped_matmul_rhs_gradient",
    abstract_eval=_rhs_gradient_avals,
    reference=reference.grouped_matmul_rhs_gradient,
    attributes=_rhs_gradient_attributes,
    unsupported=_unsupported,
    aliases=_rhs_gradient_aliases,
)


# ---- binding, for the derivatives of this and other modules


def bind_matmul(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, params: GroupedMatmulParams
) -> jax.Array:
    """Binds grouped_matmul, with rhs in the dtype that its kernel reads best."""
    (out,) = grouped_matmul_p.bind(lhs, kernel_rhs(lhs, rhs), group_sizes, params=params)
    return out


def bind_rhs_gradient(
    lhs: jax.Array,
    out_bar: jax.Array,
    group_sizes: jax.Array,
    params: GroupedMatmulParams,
    accumulator: jax.Array | None = None,
) -> jax.Array:
    """Binds grouped_matmul_rhs_gradient. An accumulator requires a float32 result."""
    (rhs_bar,) = grouped_matmul_rhs_gradient_p.bind(
        lhs,
        out_bar,
        group_sizes,
        *(() if accumulator is None else (accumulator,)),
        params=params,
        has_accumulator=accumulator is not None,
    )
    return rhs_bar


def kernel_rhs(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Casts a float32 rhs to lhs's dtype where that is faster; the kernel rounds to it anyway.

    With many rows per group, the kernel for 16-bit operands makes up for the cast. With few, the
    matmul is bound by reading the matrices, and a cast would read them once more.
    """
    return rhs.astype(lhs.dtype) if lhs.shape[0] > CAST_ROWS * rhs.shape[0] else rhs


# ---- derivative: two grouped matmuls over the same groups


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def chained_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    accumulator: jax.Array | None,
    params: GroupedMatmulParams,
    accumulation: Accumulation,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the product, and the stand-in for rhs's accumulator if a later call takes it."""
    out = bind_matmul(lhs, rhs, group_sizes, params)
    return out, pass_on(accumulator, out) if accumulation.passes_on else None


def matmul_backward(
    params: GroupedMatmulParams,
    accumulation: Accumulation,
    residuals: Any,
    out_bar: jax.Array,
    accumulator: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of lhs and rhs; the latter is the accumulator if there is a chain."""
    lhs, rhs, group_sizes = residuals
    # Tensor cores multiply operands of one dtype, so a float32 cotangent is rounded to lhs's.
    out_bar = out_bar.astype(lhs.dtype)
    to_lhs = dataclasses.replace(
        params, transpose_rhs=not params.transpose_rhs, out_dtype=jnp.dtype(lhs.dtype)
    )
    lhs_bar = bind_matmul(out_bar, rhs, group_sizes, to_lhs)
    to_rhs = dataclasses.replace(params, out_dtype=jnp.dtype(accumulation.dtype(rhs)))
    return lhs_bar, bind_rhs_gradient(lhs, out_bar, group_sizes, to_rhs, accumulator)


def _forward(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    accumulator: jax.Array | None,
    params: GroupedMatmulParams,
    accumulation: Accumulation,
) -> Any:
    results = chained_matmul(lhs, rhs, group_sizes, accumulator, params, accumulation)
    return results, (lhs, rhs, group_sizes)


def _backward(
    params: GroupedMatmulParams, accumulation: Accumulation, residuals: Any, cotangents: Any
) -> Any:
    lhs_bar, rhs_bar = matmul_backward(params, accumulation, residuals, *cotangents)
    if accumulation is Accumulation.NONE:
        return lhs_bar, rhs_bar, None, None
    return lhs_bar, None, None, rhs_bar


chained_matmul.defvjp(_forward, _backward)
