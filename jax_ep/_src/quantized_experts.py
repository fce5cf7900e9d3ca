"""Experts whose matrices are quantized before a call, and what a layer by a recipe takes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep._src import compat
from jax_ep._src.errors import ArgumentError
from jax_ep._src.experts import Experts, UpWeights, check_forms
from jax_ep._src.quantize import check_floats
from jax_ep._src.quantize_for_training import quantize_layouts
from jax_ep._src.recipe import (
    QuantizedExperts,
    QuantizedWeights,
    Recipe,
    check_no_quantized_weights,
    check_quantized_experts,
    check_recipe,
    check_row_dtype,
)


def quantize_experts(
    w_up: UpWeights, w_down: jax.Array, recipe: Recipe, *, implementation: str | None = None
) -> QuantizedExperts:
    """Quantizes the matrices of experts for `moe_mlp` or `grouped_mlp`.

    Call it once per optimizer step, outside of the function that is differentiated.

    Args:
      w_up: in each form that `moe_mlp` takes.
      w_down: [L, F, H].
      recipe: that of the layer.
      implementation: as in `quantize_weights`.

    Returns:
      The quantized w_up and w_down, as `quantize_for_training` makes them. All arrays of them have
      the dimension L first, so that ``PartitionSpec("expert")`` shards them.

    Raises:
      The errors of `quantize`.
    """
    operation = "quant.quantize_experts"
    check_recipe(operation, recipe)
    check_floats(operation, "w_down", w_down, recipe.weights, 2)
    *leading, size, hidden = w_down.shape
    up, _ = check_forms(operation, "w_up", w_up, (*leading, hidden), size, None, "any activation")
    if up[0].ndim > w_down.ndim:  # [L, H, 2, F]
        up = (compat.join_last_axes(jnp.asarray(up[0])),)
    layouts = functools.partial(
        quantize_layouts, operation, recipe=recipe, implementation=implementation
    )
    return QuantizedWeights(*layouts(up)), QuantizedWeights(*layouts((w_down,)))


def check_quantization(
    operation: str,
    rows_name: str,
    rows: jax.Array,
    experts: Experts | None,
    activation: Any,
    recipe: Recipe | None,
    quantized: QuantizedExperts | None,
) -> None:
    """Raises for what a recipe does not cover, and for quantized matrices that do not fit."""
    if recipe is None:
        return check_no_quantized_weights(operation, "quantized_weights", quantized)
    check_recipe(operation, recipe, "quantization")
    check_row_dtype(operation, rows_name, rows)
    if experts is None:
        other = "experts_fn"
    elif not isinstance(activation, str):
        other = "a function as the activation"
    elif experts.b_up is not None or experts.b_down is not None:
        other = "biases"
    elif quantized is None:
        return None
    else:
        shapes = experts.w_up.shape, experts.w_down.shape
        return check_quantized_experts(operation, quantized, recipe, *shapes)
    raise ArgumentError(
        f"jax_ep.{operation}: quantization is given with {other}; expected experts of a named "
        "activation without biases. Leave it out, or call grouped_matmul with it."
    )
