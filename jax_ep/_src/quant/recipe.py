"""Recipes: the formats of a layer's grouped matmuls; and weights that are quantized by one."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jax_ep._src.core.errors import ArgumentError, DtypeError, UnavailableError
from jax_ep._src.quant.formats import Format, Fp8Block128, check_format, check_no_tensor_scale
from jax_ep._src.quant.quantized import Quantized, check


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The formats of the grouped matmuls of a layer, compared and hashed by value.

    The forward pass quantizes rows and weights; the gradients of rows come from quantized
    cotangents and weights. The gradients of weights come from dequantized rows and from cotangents
    that are not quantized, unless they were sent so, or `quantized_weight_gradients` quantizes both
    once more.

    For example::

        recipe = quant.Recipe(quantized_dispatch=True)
        layer = jax_ep.nnx.MoE(128, 128, 8, 2, quantization=recipe, rngs=nnx.Rngs(0))

    Attributes:
      rows: the format of rows. Weights have E4M3 values with scales of the same kind.
      gradients: the format of cotangents, of the class of `rows`; None takes `rows`. Its `min_amax`
        is not used: cotangents have the least one, as gradients may be of any magnitude.
      quantized_dispatch: whether `moe_mlp` sends rows quantized, in about half of the bytes of
        bfloat16, with the same bits in its results. combine sends rows in their dtype.
      quantized_cotangents: whether the backward pass of `moe_mlp` sends the cotangents of combine's
        result quantized, as the matmul that reads them does. The gradient of w_down then comes from
        dequantized cotangents; all others have the same bits.
      quantized_weight_gradients: whether the gradients of weights are multiplied in eight bits as
        well, E4M3 with a scale for 128 rows of a group and a column, or 128 columns. On random data
        they differ from float32's by 6.3 to 7.1 % of their norm then, rather than by 5.4 to 6.1 %.
        By a recipe of blocks a kernel computes the gradient of swiglu or geglu where it quantizes
        it, so that on GPUs gradients of rows are rounded otherwise, too. It pays with many rows
        per group, and in whole layers.
    """

    rows: Format = dataclasses.field(default_factory=Fp8Block128)
    gradients: Format | None = None
    quantized_dispatch: bool = False
    quantized_cotangents: bool = False
    quantized_weight_gradients: bool = False

    def __post_init__(self) -> None:
        for name in "rows", "gradients":
            if not isinstance(getattr(self, name), Format if name == "rows" else Format | None):
                raise DtypeError(
                    f"jax_ep.quant.Recipe: {name}={getattr(self, name)!r}; expected a "
                    "jax_ep.quant.Fp8Block128 or Fp8Row. Formats are values: call the class, as in "
                    "Fp8Block128()."
                )
        check_no_tensor_scale("quant.Recipe", self.rows)
        for name in (
            "quantized_dispatch",
            "quantized_cotangents",
            "quantized_weight_gradients",
        ):
            if not isinstance(getattr(self, name), bool):
                raise DtypeError(
                    f"jax_ep.quant.Recipe: {name}={getattr(self, name)!r}; expected True or False. "
                    "Recipes are static: give a Python bool."
                )
        if self.gradients is None:
            object.__setattr__(self, "gradients", self.rows)
        if type(self.rows) is not type(self.gradients):
            raise ArgumentError(
                f"jax_ep.quant.Recipe: rows={self.rows} with gradients={self.gradients}; expected "
                "formats of one class, as both are multiplied by the same weights. Use Fp8Row for "
                "both, or Fp8Block128."
            )

    @property
    def weights(self) -> Format:
        """The format of weights."""
        return self.rows.for_weights()

    @property
    def cotangents(self) -> Format:
        """The format of cotangents, which is `gradients` with the least `min_amax`."""
        assert self.gradients is not None
        return self.gradients.for_cotangents()


@dataclasses.dataclass(frozen=True)
class WeightsOnly:
    """The format of weights that are quantized in memory only, compared and hashed by value.

    Rows, biases and activations are those of a layer with float matrices, and the experts take a
    quarter of bfloat16's memory with `MxFp4`. Kernels for compute capability 9.0 multiply bfloat16
    rows, and their cotangents, by matrices in `MxFp4`. Other calls dequantize the matrices to the
    dtype of the rows. They are then in memory in both, one layer's at a time.

    For example::

        quantized = quant.quantize_experts(w_up, w_down, quant.WeightsOnly(quant.MxFp4()))

    Attributes:
      weights: the format.
    """

    weights: Format

    def __post_init__(self) -> None:
        check_format("quant.WeightsOnly", self.weights)
        check_no_tensor_scale("quant.WeightsOnly", self.weights)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedWeights:
    """The matrices of a grouped matmul, quantized for its forward pass and for its row gradients.

    `jax_ep.quant.quantize_for_training` makes them. Each is read along its last axis, which is how
    kernels read eight-bit operands.

    Attributes:
      forward: [..., N, K].
      backward: [..., K, N], or None for inference. With blocks of 128 x 128 it is the transpose of
        `forward`, and derivatives without it transpose `forward` in every call.
    """

    forward: Quantized
    backward: Quantized | None = None

    instead_of_array: ClassVar[str] = (
        "Give the float weights here, and these as quantized_weights or quantized_rhs."
    )

    @property
    def layouts(self) -> tuple[Quantized, ...]:
        """The layouts that exist, forward before backward."""
        return (self.forward,) if self.backward is None else (self.forward, self.backward)


QuantizedExperts = tuple[QuantizedWeights, QuantizedWeights]
"""The experts' quantized matrices: those of w_up [L, H, N], gate before up, and w_down [L, F, H].

`jax_ep.quant.quantize_experts`, `experts_from_checkpoint` and the layers' `quantize_weights` make
them; `moe_mlp`, `grouped_mlp` and the layers take them as ``quantized_weights``.
"""


def check_recipe(operation: str, quantization: Any, *, weights_only: bool = False) -> None:
    """Raises unless it is a recipe, or quantizes weights only where that is fine."""
    if isinstance(quantization, WeightsOnly) and not weights_only:
        raise DtypeError(
            f"jax_ep.{operation}: quantization={quantization!r}; expected a jax_ep.quant.Recipe, "
            "by which rows are quantized, too. Dequantize the weights, or call moe_mlp or "
            "grouped_mlp."
        )
    if not isinstance(quantization, Recipe | WeightsOnly):
        raise DtypeError(
            f"jax_ep.{operation}: quantization={quantization!r}; expected a jax_ep.quant.Recipe. "
            "Recipes are values: call the class, as in Recipe()."
        )


def check_quantized_weights(
    operation: str,
    name: str,
    quantized: Any,
    recipe: Recipe | WeightsOnly,
    shape: tuple[int, ...],
) -> None:
    """Raises unless the layouts are those of matrices [G, K, N] of this shape."""
    check_layouts(operation, name, quantized, recipe)
    groups, k, n = shape
    given = tuple(layout.shape for layout in quantized.layouts)
    expected = ((groups, n, k), (groups, k, n))[: len(given)]
    if given != expected:
        raise ArgumentError(
            f"jax_ep.{operation}: {name} has layouts of shapes {given}; expected {expected}, those "
            "of the weights. Quantize these weights."
        )


def check_layouts(operation: str, name: str, quantized: Any, recipe: Recipe | WeightsOnly) -> None:
    """Raises unless they are quantized weights in the recipe's format."""
    if not isinstance(quantized, QuantizedWeights):
        raise DtypeError(
            f"jax_ep.{operation}: {name} is a {type(quantized).__name__}; expected a "
            "jax_ep.quant.QuantizedWeights. Give what jax_ep.quant.quantize_for_training or "
            "quantize_experts returned."
        )
    for pass_name in "forward", "backward":
        layout = getattr(quantized, pass_name)
        if layout is None and pass_name == "backward":
            continue
        if not isinstance(layout, Quantized):
            raise DtypeError(
                f"jax_ep.{operation}: {name}.{pass_name} is a {type(layout).__name__}; expected a "
                "jax_ep.quant.Quantized. Give both layouts of the weights, or forward alone."
            )
        check(operation, layout)
        # How large values were taken to be at least does not matter any more.
        if layout.format.with_min_amax(recipe.weights.min_amax) != recipe.weights:
            raise ArgumentError(
                f"jax_ep.{operation}: {name} has the format {layout.format}; expected "
                f"{recipe.weights}, by the recipe. Quantize the weights with the same recipe."
            )


def check_quantized_experts(
    operation: str,
    quantized: Any,
    recipe: Recipe | WeightsOnly,
    w_up: tuple[int, ...],
    w_down: tuple[int, ...],
) -> None:
    """Raises unless they are the pair of matrices [L, H, N] and [L, F, H] of these shapes."""
    check_pair(operation, quantized)
    for which, one, shape in zip(("up", "down"), quantized, (w_up, w_down), strict=True):
        name = f"quantized_weights ({which})"
        check_quantized_weights(operation, name, one, recipe, shape)


def check_pair(operation: str, quantized: Any) -> None:
    """Raises unless they are two."""
    is_sequence = isinstance(quantized, tuple | list)
    if not is_sequence or len(quantized) != 2:
        given = f"{type(quantized).__name__}{f' of {len(quantized)}' if is_sequence else ''}"
        raise DtypeError(
            f"jax_ep.{operation}: quantized_weights is a {given}; expected a pair, of w_up and "
            "w_down. Give what jax_ep.quant.quantize_experts returned."
        )


def constant[T](operation: str, name: str, quantized: T) -> T:
    """Returns quantized weights, and raises if they are differentiated: zeros would be silent."""

    @jax.custom_jvp
    def unchanged(quantized: T) -> T:
        return quantized

    @unchanged.defjvp
    def _raise(primals: Any, tangents: Any) -> Any:
        raise UnavailableError(
            f"jax_ep.{operation}: {name} are differentiated; expected constants, as the derivative "
            "is of the float weights. Differentiate these, and use jax.lax.stop_gradient on "
            f"{name}."
        )

    result: T = unchanged(quantized)
    return result


def check_no_quantized_weights(operation: str, name: str, given: Any) -> None:
    """Raises for quantized weights without a recipe."""
    if given is not None:
        raise ArgumentError(
            f"jax_ep.{operation}: {name} is given without quantization; expected both or none. "
            "Give the jax_ep.quant.Recipe by which the weights were quantized."
        )


def check_row_dtype(operation: str, name: str, rows: jax.Array) -> None:
    """Raises for a dtype that quantized matmuls do not return."""
    if rows.dtype not in (jnp.bfloat16, jnp.float32):
        raise DtypeError(
            f"jax_ep.{operation}: {name} has dtype {rows.dtype} with quantization; expected "
            f"bfloat16 or float32. Cast it with {name}.astype(jnp.bfloat16)."
        )
