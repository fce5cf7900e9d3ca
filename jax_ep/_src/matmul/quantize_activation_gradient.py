"""The gradients of a gated activation, quantized as the gradients of rows and of weights read them.

quantize_activation_gradient: activations_bar [M, F], pre_activation [M, 2F], first_rows, num_rows,
[row_weights] -> values and scales of the pre-activation's gradient, the same transposed, those of
the activations transposed, row_dots [M, F / 128]
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._src.core import compat, primitive
from jax_ep._src.core.compat import Aval
from jax_ep._src.matmul.activations import GATED_ACTIVATIONS, NamedActivation, activate_backward
from jax_ep._src.matmul.row_blocks import RowBlocks
from jax_ep._src.quant import reference
from jax_ep._src.quant.formats import BLOCK, Format, row_scales
from jax_ep._src.quant.quantize import scale_attributes
from jax_ep._src.quant.quantize_both import can_quantize_both
from jax_ep._src.quant.quantize_transposed import (
    Transposed,
    transposed_format,
    transposed_reference,
    transposed_shapes,
)
from jax_ep._src.quant.quantized import Quantized
from jax_ep._src.quant.recipe import Recipe

DTYPE = jnp.dtype(jnp.bfloat16)
"""The dtype of operands, and the one to which gradients are rounded before they are quantized."""


@dataclasses.dataclass(frozen=True)
class QuantizeActivationGradientParams:
    """Parameters of quantize_activation_gradient; the formats are beside them."""

    activation: NamedActivation  # one of GATED_ACTIVATIONS
    implementation: str | None


class QuantizedActivationGradient(NamedTuple):
    """The results; rows past the last group are unspecified."""

    pre_activation_bar: Quantized  # [M, 2F]
    transposed: Transposed  # the same
    activations: Transposed  # times row weights
    row_dots: jax.Array  # float32[M, F / 128]: of the activations and their gradient


def can_quantize_activation_gradient(
    recipe: Recipe, activation: NamedActivation, pre_activation: jax.Array, dtype: Any
) -> bool:
    """Whether `bind_quantize_activation_gradient` takes these: gate and up in whole blocks."""
    return (
        recipe.quantized_weight_gradients
        and activation in GATED_ACTIVATIONS
        and pre_activation.dtype == dtype == DTYPE
        and pre_activation.shape[1] % (2 * BLOCK) == 0
        and pre_activation.size > 0
        and can_quantize_both(recipe.cotangents)
    )


def bind_quantize_activation_gradient(
    activations_bar: jax.Array,
    pre_activation: jax.Array,
    blocks: RowBlocks,
    row_weights: jax.Array | None,
    recipe: Recipe,
    params: QuantizeActivationGradientParams,
) -> QuantizedActivationGradient:
    """Binds the primitive, in a derivative rule.

    activations_bar [M, F] and pre_activation [M, 2F] are bfloat16, row_weights float32[M]. The
    gradient of the pre-activation has a scale per row and 128 columns; transposed it has one per
    row block and 128 columns. The activations have one per row block and column.
    """
    weights = () if row_weights is None else (row_weights,)
    *arrays, row_dots = quantize_activation_gradient_p.bind(
        activations_bar,
        pre_activation,
        blocks.first_rows,
        blocks.num_rows,
        *weights,
        params=params,
        formats=(recipe.cotangents, transposed_format(recipe.rows)),
    )
    (values, scales), transposed, activations = arrays[:2], arrays[2:4], arrays[4:]
    return QuantizedActivationGradient(
        Quantized(values, scales, recipe.cotangents),
        Transposed(*transposed),
        Transposed(*activations),
        row_dots,
    )


# ---- the primitive; formats are those of the gradient and of the activations


def _avals(
    activations_bar: Aval,
    pre_activation: Aval,
    first_rows: Aval,
    *_: Aval,
    params: QuantizeActivationGradientParams,
    formats: tuple[Format, Format],
) -> list[Aval]:
    rows, columns = activations_bar.shape
    blocks = first_rows.shape[0]
    aval = functools.partial(compat.aval_like, activations_bar)
    gradient, activations = formats
    values, scales = transposed_shapes(blocks, 2 * columns, per_column=False)
    activation_values, activation_scales = transposed_shapes(blocks, columns, per_column=True)
    return [
        aval(pre_activation.shape, gradient.dtype),
        aval(row_scales(gradient, pre_activation.shape), gradient.scale_dtype),
        aval(values, gradient.dtype),
        aval(scales, gradient.scale_dtype),
        aval(activation_values, activations.dtype),
        aval(activation_scales, activations.scale_dtype),
        aval((rows, columns // BLOCK), jnp.float32),
    ]


def _reference(
    activations_bar: jax.Array,
    pre_activation: jax.Array,
    first_rows: jax.Array,
    num_rows: jax.Array,
    *row_weights: jax.Array,
    params: QuantizeActivationGradientParams,
    formats: tuple[Format, Format],
) -> tuple[jax.Array, ...]:
    gradient, of_activations = formats
    pre_activation_bar, activations, products = activate_backward(
        params.activation, activations_bar, pre_activation, row_weights[0] if row_weights else None
    )
    row_dots = products.reshape(products.shape[0], -1, BLOCK).sum(2)
    pre_activation_bar = pre_activation_bar.astype(DTYPE)
    rows = reference.quantized(pre_activation_bar, gradient, (1, BLOCK))

    def transposed(x: jax.Array, format: Format, per_column: bool) -> tuple[jax.Array, jax.Array]:
        return transposed_reference(x, (), first_rows, num_rows, format, per_column)

    return (
        rows.values,
        rows.scales,
        *transposed(pre_activation_bar, gradient, per_column=False),
        *transposed(activations.astype(DTYPE), of_activations, per_column=True),
        row_dots,
    )


def _attributes(
    avals: list[Aval],
    params: QuantizeActivationGradientParams,
    formats: tuple[Format, Format],
) -> dict[str, Any]:
    gradient, activations = map(scale_attributes, formats)
    return {
        "activation": params.activation,
        "has_row_weights": np.bool_(len(avals) == 5),
        **gradient,
        **{f"activation_{name}": value for name, value in activations.items()},
    }


def _unsupported(
    avals: list[Aval],
    params: QuantizeActivationGradientParams,
    formats: tuple[Format, Format],
) -> str | None:
    _, pre_activation, first_rows, *_ = avals
    rows, columns = pre_activation.shape
    return primitive.too_many(
        num_rows=2 * rows, row_size=columns, row_blocks=2 * first_rows.shape[0]
    )


quantize_activation_gradient_p = primitive.define_primitive(
    "quantize_activation_gradient",
    abstract_eval=_avals,
    reference=_reference,
    attributes=_attributes,
    unsupported=_unsupported,
)
