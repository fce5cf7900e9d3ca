"""The MLP of an activation with a name, by a recipe: a derivative rule, float arrays at its faces.

Rows, activations and cotangents are quantized where a matmul reads them. The row weight multiplies
the activations, which are quantized in float32.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep._src.matmul.accumulation import Accumulators
from jax_ep._src.matmul.activations import activate
from jax_ep._src.matmul.grouped_matmul_quantized import bind_quantized
from jax_ep._src.matmul.grouped_matmul_quantized_activation import (
    bind_quantized_activation,
    has_quantized_activation,
)
from jax_ep._src.matmul.grouped_matmul_quantized_rhs_gradient import (
    bind_weight_gradient,
    quantize_cotangents,
)
from jax_ep._src.mlp.experts import Experts, gradient_of_experts
from jax_ep._src.mlp.params import GroupedMlpParams
from jax_ep._src.mlp.quantized_activation_gradient import activation_gradient
from jax_ep._src.quant.quantize import quantize
from jax_ep._src.quant.quantize_for_training import Pass, layout
from jax_ep._src.quant.quantize_transposed import Transposed
from jax_ep._src.quant.quantized import Quantized, as_bits, from_bits
from jax_ep._src.quant.recipe import Recipe


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def quantized_mlp(
    rows: jax.Array,
    experts: Experts,
    group_sizes: jax.Array,
    row_weights: jax.Array | None,
    params: GroupedMlpParams,
) -> tuple[jax.Array, Accumulators]:
    """Returns [M, H] in rows' dtype, and the accumulators for a later call."""
    y, _ = quantized_mlp_forward(rows, experts, group_sizes, row_weights, params, keep=False)
    return y, experts.passed_on(params.accumulation, y)


def quantized_mlp_forward(
    rows: jax.Array | Quantized,
    experts: Experts,
    group_sizes: jax.Array,
    row_weights: jax.Array | None,
    params: GroupedMlpParams,
    *,
    keep: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the result, and the pre-activation if it is to be kept."""
    quantized, dtype = quantized_rows(rows, params)
    return _mlp(quantized, experts, group_sizes, row_weights, params, dtype, keep=keep)


def repeat_quantized_pre_activation(
    rows: jax.Array | Quantized,
    experts: Experts,
    group_sizes: jax.Array,
    params: GroupedMlpParams,
) -> jax.Array:
    """Returns the pre-activation that `quantized_mlp_forward` keeps."""
    quantized, dtype = quantized_rows(rows, params)
    up = _up("forward", experts, params)
    return bind_quantized(quantized, up, group_sizes, params.matmul(dtype))


def quantized_rows(rows: jax.Array | Quantized, params: GroupedMlpParams) -> tuple[Quantized, Any]:
    """Returns quantized rows and the dtype of results. Rows may be quantized since dispatch."""
    if isinstance(rows, Quantized):
        return rows, params.row_dtype
    recipe = _recipe(params)
    return quantize(rows, recipe.rows, implementation=params.implementation), rows.dtype


def quantized_cotangents(cotangents: jax.Array, params: GroupedMlpParams) -> Quantized:
    """Returns cotangents as the matmuls of the backward pass read them."""
    return quantize(cotangents, _recipe(params).cotangents, implementation=params.implementation)


def _mlp(
    rows: Quantized,
    experts: Experts,
    group_sizes: jax.Array,
    row_weights: jax.Array | None,
    params: GroupedMlpParams,
    dtype: Any,
    *,
    keep: bool,
) -> tuple[jax.Array, jax.Array | None]:
    up, down = _up("forward", experts, params), _down("forward", experts, params)
    pre_activation: jax.Array | None
    if has_quantized_activation(rows, up, params.activation, dtype):
        quantized, pre_activation = bind_quantized_activation(
            rows,
            up,
            group_sizes,
            row_weights,
            params.epilogue(params.activation),
            keep_pre_activation=keep,
        )
    else:
        pre_activation = bind_quantized(rows, up, group_sizes, params.matmul(dtype))
        activations = activate(params.activation, pre_activation.astype(jnp.float32))
        if row_weights is not None:
            activations = activations * row_weights[:, None]
        # XLA computes the activations where it quantizes them, instead of writing them.
        quantized = quantize(activations, _recipe(params).rows, implementation="xla")
    to_y = params.matmul(dtype, zero_tail=params.zero_tail)
    y = bind_quantized(quantized, down, group_sizes, to_y)
    if not keep:
        return y, None
    return y, checkpoint_name(pre_activation, "jax_ep.pre_activation")


def quantized_mlp_backward(
    params: GroupedMlpParams,
    residuals: Any,
    y_bar: jax.Array | Quantized,
    accumulators: Accumulators,
) -> tuple[jax.Array, Experts, jax.Array | None]:
    """Returns the gradients of rows, experts and row weights.

    Cotangents may be quantized since their redispatch. The gradient of w_down then reads what they
    are dequantized to, and otherwise those that were not quantized.
    """
    rows, experts, group_sizes, row_weights, pre_activation = residuals
    dtype: Any
    y_bar_for_weights: jax.Array | Quantized | Transposed
    if isinstance(y_bar, Quantized):
        quantized_bar, y_bar_for_weights, dtype = y_bar, y_bar, params.row_dtype
    else:
        dtype = y_bar.dtype
        quantized_bar, y_bar_for_weights = quantize_cotangents(
            y_bar, group_sizes, _recipe(params), params.matmul(dtype)
        )
    up, down = _up("backward", experts, params), _down("backward", experts, params)
    activations_bar = bind_quantized(quantized_bar, down, group_sizes, params.matmul(dtype))
    gradient = activation_gradient(
        activations_bar,
        pre_activation,
        group_sizes,
        row_weights,
        params,
        for_weights=experts.w_up is not None,
    )
    row_weights_bar = gradient.row_weights_bar
    rows_bar = bind_quantized(
        gradient.pre_activation_bar,
        up,
        group_sizes,
        params.matmul(dtype, zero_tail=params.zero_tail),
    )
    if experts.w_up is None:
        return rows_bar, gradient_of_experts(params.accumulation, *(None,) * 4), row_weights_bar
    rows, _ = quantized_rows(rows, params)
    to_up, to_down = (
        params.matmul(params.accumulation.dtype(w)) for w in (experts.w_up, experts.w_down)
    )
    weight_gradient = functools.partial(
        bind_weight_gradient,
        group_sizes=group_sizes,
        recipe=_recipe(params),
        dtype=dtype,
        num_rows=y_bar.shape[0],
    )
    w_up_bar = weight_gradient(
        rows,
        gradient.pre_activation_bar_for_weights,
        params=to_up,
        accumulator=accumulators.w_up,
    )
    w_down_bar = weight_gradient(
        gradient.activations_for_weights,
        y_bar_for_weights,
        params=to_down,
        accumulator=accumulators.w_down,
    )
    experts_bar = gradient_of_experts(params.accumulation, w_up_bar, w_down_bar, None, None)
    return rows_bar, experts_bar, row_weights_bar


def _recipe(params: GroupedMlpParams) -> Recipe:
    assert params.quantization is not None
    return params.quantization


def _up(of_pass: Pass, experts: Experts, params: GroupedMlpParams) -> Quantized:
    quantized = None if experts.quantized is None else experts.quantized[0]
    recipe, implementation = _recipe(params), params.implementation
    return layout(of_pass, experts.w_up, quantized, recipe, implementation=implementation)


def _down(of_pass: Pass, experts: Experts, params: GroupedMlpParams) -> Quantized:
    quantized = None if experts.quantized is None else experts.quantized[1]
    recipe, implementation = _recipe(params), params.implementation
    return layout(of_pass, experts.w_down, quantized, recipe, implementation=implementation)


def _forward(
    rows: jax.Array,
    experts: Experts,
    group_sizes: jax.Array,
    row_weights: jax.Array | None,
    params: GroupedMlpParams,
) -> Any:
    quantized, _ = quantized_rows(rows, params)  # kept: half of the rows' bytes
    y, pre_activation = _mlp(
        quantized, experts, group_sizes, row_weights, params, rows.dtype, keep=True
    )
    residuals = quantized, experts.without_accumulators(), group_sizes, row_weights, pre_activation
    return (y, experts.passed_on(params.accumulation, y)), as_bits(residuals)


def _backward(params: GroupedMlpParams, residuals: Any, cotangents: Any) -> Any:
    residuals = from_bits(residuals)
    rows_bar, experts_bar, row_weights_bar = quantized_mlp_backward(params, residuals, *cotangents)
    return rows_bar, experts_bar, None, row_weights_bar


quantized_mlp.defvjp(_forward, _backward)
