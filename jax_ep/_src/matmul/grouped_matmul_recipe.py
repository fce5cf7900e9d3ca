"""grouped_matmul by a recipe: float arrays at its faces, quantized operands inside.

Eight-bit arrays never cross the boundary of a derivative rule: a cotangent has the dtype of its
array, and eight bits would break it in silence.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep._src.core import compat
from jax_ep._src.matmul.grouped_matmul_quantized import bind_quantized
from jax_ep._src.matmul.grouped_matmul_quantized_rhs_gradient import (
    bind_weight_gradient,
    quantize_cotangents,
)
from jax_ep._src.matmul.params import GroupedMatmulParams
from jax_ep._src.quant.quantize import quantize
from jax_ep._src.quant.quantize_for_training import Pass, layout
from jax_ep._src.quant.quantized import Quantized, as_bits, from_bits
from jax_ep._src.quant.recipe import (
    QuantizedWeights,
    Recipe,
    check_quantized_weights,
    check_recipe,
    check_row_dtype,
    constant,
)


def grouped_matmul_by_recipe(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    quantized_rhs: QuantizedWeights | None,
    recipe: Recipe,
    params: GroupedMatmulParams,
) -> jax.Array:
    """Called by `grouped_matmul`, which has checked the rest."""
    operation = "grouped_matmul"
    check_recipe(operation, recipe)
    check_row_dtype(operation, "lhs", lhs)
    if quantized_rhs is not None:
        shape = (rhs.mT if params.transpose_rhs else rhs).shape
        check_quantized_weights(operation, "quantized_rhs", quantized_rhs, recipe, shape)
        quantized_rhs = constant(operation, "quantized_rhs", quantized_rhs)
    lhs, rhs, group_sizes, quantized_rhs = compat.vary_together(
        (lhs, rhs, group_sizes, quantized_rhs)
    )
    dtypes = (jnp.dtype(lhs.dtype), jnp.dtype(rhs.dtype))
    with jax.named_scope("jax_ep.grouped_matmul"):
        return _matmul(lhs, rhs, group_sizes, quantized_rhs, recipe, params, dtypes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    quantized_rhs: QuantizedWeights | None,
    recipe: Recipe,
    params: GroupedMatmulParams,
    dtypes: tuple[Any, Any],
) -> jax.Array:
    out, _ = _forward(lhs, rhs, group_sizes, quantized_rhs, recipe, params, dtypes)
    return out


def _forward(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    quantized_rhs: QuantizedWeights | None,
    recipe: Recipe,
    params: GroupedMatmulParams,
    dtypes: tuple[Any, Any],
) -> Any:
    rows = quantize(lhs, recipe.rows, implementation=params.implementation)
    matrices = _layout("forward", rhs, quantized_rhs, recipe, params)
    out = bind_quantized(rows, matrices, group_sizes, params)
    # The backward pass quantizes rhs itself, so that no array is kept for it.
    kept = rhs if quantized_rhs is None else quantized_rhs.backward or quantized_rhs
    return out, as_bits((rows, kept, group_sizes))


def _backward(
    recipe: Recipe,
    params: GroupedMatmulParams,
    dtypes: tuple[Any, Any],
    residuals: Any,
    out_bar: jax.Array,
) -> Any:
    rows, kept, group_sizes = from_bits(residuals)
    of_lhs, _ = dtypes
    to_lhs, to_rhs = (dataclasses.replace(params, out_dtype=dtype) for dtype in dtypes)
    cotangents, for_weights = quantize_cotangents(out_bar, group_sizes, recipe, params)
    matrices = kept
    if not isinstance(kept, Quantized):
        quantized = kept if isinstance(kept, QuantizedWeights) else None
        matrices = _layout("backward", kept, quantized, recipe, params)
    lhs_bar = bind_quantized(cotangents, matrices, group_sizes, to_lhs)
    rhs_bar = bind_weight_gradient(
        rows, for_weights, group_sizes, recipe, to_rhs, of_lhs, num_rows=out_bar.shape[0]
    )
    return lhs_bar, rhs_bar, None, None


def _layout(
    of_pass: Pass,
    rhs: jax.Array,
    quantized: QuantizedWeights | None,
    recipe: Recipe,
    params: GroupedMatmulParams,
) -> Quantized:
    return layout(
        of_pass,
        rhs,
        quantized,
        recipe,
        transpose_rhs=params.transpose_rhs,
        implementation=params.implementation,
    )


_matmul.defvjp(_forward, _backward)
