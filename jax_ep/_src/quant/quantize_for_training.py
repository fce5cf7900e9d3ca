"""quantize_for_training: weights in the layouts that the passes of a grouped matmul read."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from jax_ep._src.core import checks
from jax_ep._src.core.errors import UnavailableError
from jax_ep._src.quant.quantize import check_floats
from jax_ep._src.quant.quantize_weights import quantize_blocks, quantize_weights
from jax_ep._src.quant.quantized import Quantized
from jax_ep._src.quant.recipe import QuantizedWeights, Recipe, WeightsOnly, check_recipe

OPERATION = "quant.quantize_for_training"
Pass = Literal["forward", "backward"]


def quantize_for_training(
    w: jax.Array,
    quantization: Recipe,
    *,
    transpose_rhs: bool = False,
    implementation: str | None = None,
) -> QuantizedWeights:
    """Quantizes the matrices of a grouped matmul in the layouts that both passes read.

    Call it once per optimizer step, outside of the function that you differentiate, as it has no
    derivative. Together the layouts take as many bytes as w in bfloat16.

    For example::

        rhs = jnp.ones((3, 128, 256))
        quantized = quant.quantize_for_training(rhs, quant.Recipe())
        # grouped_matmul(lhs, rhs, sizes, quantization=quant.Recipe(), quantized_rhs=quantized)

    Args:
      w: float[..., K, N], or [..., N, K] with `transpose_rhs`.
      quantization: the recipe of the matmul.
      transpose_rhs: whether w is [..., N, K].
      implementation: as in `quantize_weights`.

    Returns:
      The quantized matrices.

    Raises:
      The errors of `quantize`.
    """
    check_recipe(OPERATION, quantization)
    layouts = quantize_layouts(
        OPERATION, (w,), quantization, transpose_rhs=transpose_rhs, implementation=implementation
    )
    return QuantizedWeights(*layouts)


def layout(
    of_pass: Pass,
    w: jax.Array,
    quantized: QuantizedWeights | None,
    recipe: Recipe,
    *,
    transpose_rhs: bool = False,
    implementation: str | None,
) -> Quantized:
    """Returns what one pass reads: of `quantized`, or else of w, in that layout alone."""
    if quantized is not None:
        return quantized.forward if of_pass == "forward" else backward_layout(quantized)
    (only,) = quantize_layouts(
        OPERATION,
        (w,),
        recipe,
        forward=of_pass == "forward",
        backward=of_pass == "backward",
        transpose_rhs=transpose_rhs,
        implementation=implementation,
    )
    return only


def backward_layout(quantized: QuantizedWeights) -> Quantized:
    """Returns what the gradient of rows reads, which square blocks need not have."""
    if quantized.backward is not None:
        return quantized.backward
    if quantized.forward.format.has_square_blocks:
        return quantized.forward.mT
    raise UnavailableError(
        f"jax_ep.{OPERATION}: a derivative reads quantized weights of the format "
        f"{quantized.forward.format} that lack the layout backward; expected both, as the layouts "
        "have different scales. Give those of quantize_for_training or quantize_experts."
    )


def quantize_layouts(
    operation: str,
    parts: tuple[jax.Array, ...],
    recipe: Recipe | WeightsOnly,
    *,
    forward: bool = True,
    backward: bool = True,
    transpose_rhs: bool = False,
    implementation: str | None,
) -> list[Quantized]:
    """Returns the layouts that are asked for, forward before backward.

    Several parts are matrices side by side, whose columns are joined.
    """
    for part in parts:
        check_floats(operation, "w", part, recipe.weights, 2)
    implementation = checks.implementation(operation, implementation)
    if recipe.weights.has_square_blocks:
        as_given, transposed = (forward, backward) if transpose_rhs else (backward, forward)
        layouts = quantize_blocks(
            operation,
            parts,
            recipe.weights,
            as_given=as_given,
            transposed=transposed,
            implementation=implementation,
        )
        return layouts if transpose_rhs else layouts[::-1]
    w = jnp.concatenate(parts, axis=-1)
    read_forward, read_backward = (w, w.mT) if transpose_rhs else (w.mT, w)
    read = [read_forward] * forward + [read_backward] * backward
    return [quantize_weights(w, recipe.weights, transpose_rhs=True) for w in read]
