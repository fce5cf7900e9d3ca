"""The gradient of the activation between quantized matmuls, as the backward pass reads it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_ep._src.matmul.activations import activate_backward
from jax_ep._src.matmul.grouped_matmul_quantized_rhs_gradient import quantize_cotangents
from jax_ep._src.matmul.groups import rows_in_groups
from jax_ep._src.matmul.quantize_activation_gradient import (
    QuantizeActivationGradientParams,
    bind_quantize_activation_gradient,
    can_quantize_activation_gradient,
)
from jax_ep._src.matmul.row_blocks import row_blocks
from jax_ep._src.mlp.params import GroupedMlpParams
from jax_ep._src.quant.quantize_transposed import Transposed
from jax_ep._src.quant.quantized import Quantized


class ActivationGradient(NamedTuple):
    """Operands of the matmuls that follow, and the gradient of the row weights."""

    pre_activation_bar: Quantized
    pre_activation_bar_for_weights: jax.Array | Transposed
    activations_for_weights: jax.Array | Transposed  # times row weights
    row_weights_bar: jax.Array | None


def activation_gradient(
    activations_bar: jax.Array,
    pre_activation: jax.Array,
    group_sizes: jax.Array,
    row_weights: jax.Array | None,
    params: GroupedMlpParams,
    *,
    for_weights: bool,
) -> ActivationGradient:
    """Returns the gradients in one pass over memory, if those of weights read eight bits, too."""
    recipe = params.quantization
    assert recipe is not None
    if for_weights and can_quantize_activation_gradient(
        recipe, params.activation, pre_activation, activations_bar.dtype
    ):
        quantized = bind_quantize_activation_gradient(
            activations_bar,
            pre_activation,
            row_blocks(group_sizes, pre_activation.shape[0]),
            row_weights,
            recipe,
            QuantizeActivationGradientParams(params.activation, params.implementation),
        )
        found = ActivationGradient(
            quantized.pre_activation_bar,
            quantized.transposed,
            quantized.activations,
            None if row_weights is None else quantized.row_dots.sum(1),
        )
    else:
        found = _in_steps(activations_bar, pre_activation, group_sizes, row_weights, params)
    if found.row_weights_bar is None or not params.zero_tail:
        return found
    in_groups = rows_in_groups(group_sizes, pre_activation.shape[0])
    return found._replace(row_weights_bar=jnp.where(in_groups, found.row_weights_bar, 0))


def _in_steps(
    activations_bar: jax.Array,
    pre_activation: jax.Array,
    group_sizes: jax.Array,
    row_weights: jax.Array | None,
    params: GroupedMlpParams,
) -> ActivationGradient:
    """Computes the gradients in plain JAX, and quantizes them."""
    assert params.quantization is not None
    dtype = activations_bar.dtype
    pre_activation_bar, activations, products = activate_backward(
        params.activation, activations_bar, pre_activation, row_weights
    )
    cotangents = quantize_cotangents(
        pre_activation_bar.astype(dtype), group_sizes, params.quantization, params.matmul(dtype)
    )
    row_weights_bar = None if row_weights is None else products.sum(1)
    return ActivationGradient(*cotangents, activations.astype(dtype), row_weights_bar)
