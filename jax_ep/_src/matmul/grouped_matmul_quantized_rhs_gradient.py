"""The gradient of a grouped matmul's matrices in eight bits: both operands are quantized.

The products of a row block, with scales of its own, are added in float32. One operand has a scale
per column and row block, and the other one per 128 columns and row block: the kernel multiplies the
products of a row block by one factor per row of the result.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep._src.core import compat, primitive
from jax_ep._src.core.compat import Aval
from jax_ep._src.core.loops import divide, fori_loop
from jax_ep._src.matmul.grouped_matmul_quantized import unsupported_gpus
from jax_ep._src.matmul.params import GroupedMatmulParams
from jax_ep._src.matmul.primitives import bind_rhs_gradient
from jax_ep._src.matmul.row_blocks import row_blocks
from jax_ep._src.quant import reference
from jax_ep._src.quant.formats import BLOCK, Format
from jax_ep._src.quant.quantize import dequantize, quantize
from jax_ep._src.quant.quantize_both import bind_quantize_both, can_quantize_both
from jax_ep._src.quant.quantize_transposed import (
    Transposed,
    bind_quantize_transposed,
    transposed_format,
)
from jax_ep._src.quant.quantized import Quantized
from jax_ep._src.quant.recipe import Recipe


def quantize_cotangents(
    out_bar: jax.Array, group_sizes: jax.Array, recipe: Recipe, params: GroupedMatmulParams
) -> tuple[Quantized, jax.Array | Transposed]:
    """Quantizes cotangents [M, N] by a recipe, in a derivative rule.

    Returns what the gradient of rows reads, and what `bind_weight_gradient` takes, both from one
    pass over the cotangents where they are quantized for both.
    """
    format, implementation = recipe.cotangents, params.implementation
    if not (_is_quantized(recipe, out_bar, group_sizes) and can_quantize_both(format)):
        return quantize(out_bar, format, implementation=implementation), out_bar
    blocks = row_blocks(group_sizes, out_bar.shape[0])
    return bind_quantize_both(
        out_bar,
        blocks.first_rows,
        blocks.num_rows,
        format,
        per_column=params.transpose_rhs,
        implementation=implementation,
    )


def _is_quantized(recipe: Recipe, rows: Any, group_sizes: jax.Array) -> bool:
    """Whether gradients of weights are multiplied in eight bits."""
    if isinstance(rows, Transposed):
        return True
    has_rows = rows.shape[0] > 0 and group_sizes.shape[0] > 0
    return recipe.quantized_weight_gradients and has_rows


def bind_weight_gradient(
    lhs: jax.Array | Quantized | Transposed,
    out_bar: jax.Array | Quantized | Transposed,
    group_sizes: jax.Array,
    recipe: Recipe,
    params: GroupedMatmulParams,
    dtype: Any,
    num_rows: int,
    accumulator: jax.Array | None = None,
) -> jax.Array:
    """Binds the gradient of weights by a recipe, in a derivative rule.

    lhs [M, K] and out_bar [M, N] may be quantized, or quantized and transposed. `dtype` is the one
    in which they are multiplied without `quantized_weight_gradients`, and `num_rows` is M. An
    accumulator requires a float32 result.
    """
    if not _is_quantized(recipe, lhs, group_sizes):
        assert not isinstance(lhs, Transposed) and not isinstance(out_bar, Transposed)
        lhs, out_bar = (
            dequantize(x, dtype) if isinstance(x, Quantized) else x.astype(dtype)
            for x in (lhs, out_bar)
        )
        return bind_rhs_gradient(lhs, out_bar, group_sizes, params, accumulator)
    blocks = row_blocks(group_sizes, num_rows)

    def transposed(x: jax.Array | Quantized | Transposed, format: Format, per_column: bool) -> Any:
        if isinstance(x, Transposed):
            return x
        return bind_quantize_transposed(
            x,
            blocks.first_rows,
            blocks.num_rows,
            transposed_format(format),
            per_column=per_column,
            implementation=params.implementation,
        )

    # Swapping the operands transposes the gradient.
    operands: list[Any] = [(lhs, recipe.rows), (out_bar, recipe.cotangents)]
    (a, of_a), (b, of_b) = operands[::-1] if params.transpose_rhs else operands
    (rhs_bar,) = grouped_matmul_quantized_rhs_gradient_p.bind(
        *transposed(a, of_a, per_column=True),
        *transposed(b, of_b, per_column=False),
        blocks.group_sizes,
        *(() if accumulator is None else (accumulator,)),
        params=params,
        has_accumulator=accumulator is not None,
    )
    return rhs_bar


# ---- the primitive: a [B, K, 128], a_scales [B, K], b [B, N, 128], b_scales [B, ceil(N / 128)],
# ---- group_sizes [G], [accumulator] -> [G, K, N]


def _avals(
    a: Aval,
    a_scales: Aval,
    b: Aval,
    b_scales: Aval,
    group_sizes: Aval,
    *accumulator: Aval,
    params: GroupedMatmulParams,
    has_accumulator: bool,
) -> list[Aval]:
    shape = (group_sizes.shape[0], a.shape[1], b.shape[1])
    result = compat.aval_like(a, shape, params.out_dtype)
    assert all(s.shape == shape and s.dtype == result.dtype == jnp.float32 for s in accumulator)
    return [result]


def _reference(
    a: jax.Array,
    a_scales: jax.Array,
    b: jax.Array,
    b_scales: jax.Array,
    group_sizes: jax.Array,
    *accumulator: jax.Array,
    params: GroupedMatmulParams,
    has_accumulator: bool,
) -> tuple[jax.Array]:
    """Multiplies the dequantized blocks in float32, and adds their products in order."""
    shape = (group_sizes.shape[0], a.shape[1], b.shape[1])
    last_blocks = jnp.cumsum(divide(group_sizes, BLOCK))
    b_scales = reference.expanded(b_scales, b.shape[:2], (1, BLOCK))

    def body(block: jax.Array, gradient: jax.Array) -> jax.Array:
        left, right = (
            values[block].astype(jnp.float32) * scales[block][:, None]
            for values, scales in ((a, a_scales), (b, b_scales))
        )
        product = jnp.matmul(left, right.T, precision=lax.Precision.HIGHEST)
        group = (last_blocks <= block).sum()
        return gradient.at[group].add(product)

    gradient = accumulator[0] if has_accumulator else jnp.zeros(shape, jnp.float32)
    gradient = fori_loop(last_blocks[-1], body, gradient, like=a, also_like=b)
    return (gradient.astype(params.out_dtype),)


def _attributes(
    avals: list[Aval], params: GroupedMatmulParams, has_accumulator: bool
) -> dict[str, Any]:
    return {
        "has_accumulator": np.bool_(has_accumulator),
        "num_sms": np.int64(params.num_sms),
    }


def _aliases(params: GroupedMatmulParams, has_accumulator: bool) -> dict[int, int]:
    return {5: 0} if has_accumulator else {}


def _unsupported(
    avals: list[Aval], params: GroupedMatmulParams, has_accumulator: bool
) -> str | None:
    if reason := unsupported_gpus():
        return reason
    (blocks, k, _), (_, n, _), (groups,) = (avals[i].shape for i in (0, 2, 4))
    if n % 8 or n == 0:
        return f"N is {n}; the FP8 kernels take positive multiples of 8"
    return primitive.too_many(num_rows=blocks * BLOCK, num_groups=groups, matrix_size=max(k, n))


grouped_matmul_quantized_rhs_gradient_p = primitive.define_primitive(
    "grouped_matmul_quantized_rhs_gradient",
    abstract_eval=_avals,
    reference=_reference,
    attributes=_attributes,
    unsupported=_unsupported,
    aliases=_aliases,
)
