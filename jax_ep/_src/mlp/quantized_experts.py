"""Experts whose matrices are quantized before a call, and what a layer by a recipe takes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._src.core import checks, compat
from jax_ep._src.core.errors import ArgumentError, DtypeError
from jax_ep._src.matmul.activations import NamedActivation
from jax_ep._src.matmul.layer_stack import check_no_layer
from jax_ep._src.mlp.expert_forms import UpWeights, check_forms
from jax_ep._src.mlp.experts import Experts
from jax_ep._src.mlp.weights_only import dequantized, kernel_weights
from jax_ep._src.quant.formats import check_no_tensor_scale
from jax_ep._src.quant.quantize import check_floats
from jax_ep._src.quant.quantize_for_training import quantize_layouts
from jax_ep._src.quant.quantized import Quantized, check
from jax_ep._src.quant.recipe import (
    QuantizedExperts,
    QuantizedWeights,
    Recipe,
    WeightsOnly,
    check_layouts,
    check_no_quantized_weights,
    check_pair,
    check_quantized_experts,
    check_recipe,
    check_row_dtype,
    constant,
)


def quantize_experts(
    w_up: UpWeights,
    w_down: jax.Array,
    quantization: Recipe | WeightsOnly,
    *,
    implementation: str | None = None,
) -> QuantizedExperts:
    """Quantizes the matrices of experts for `moe_mlp` or `grouped_mlp`.

    Call it once per optimizer step, outside of the function that you differentiate.

    For example::

        quantized = quant.quantize_experts(w_up, w_down, quant.Recipe())
        # In a shard_map: moe_mlp(..., quantization=quant.Recipe(), quantized_weights=quantized)

    Args:
      w_up: in any form that `moe_mlp` takes.
      w_down: [L, F, H].
      quantization: the layer's recipe, or `WeightsOnly`.
      implementation: as in `quantize_weights`.

    Returns:
      The quantized w_up and w_down, as `quantize_for_training` makes them; for `WeightsOnly` the
      layout of the forward pass alone. L is the first dimension
      of all their arrays, so ``PartitionSpec("expert")`` shards them.

    Raises:
      The errors of `quantize`.
    """
    operation = "quant.quantize_experts"
    check_recipe(operation, quantization, weights_only=True)
    check_floats(operation, "w_down", w_down, quantization.weights, 2)
    *leading, size, hidden = w_down.shape
    up, _ = check_forms(operation, "w_up", w_up, (*leading, hidden), size, None, "any activation")
    if up[0].ndim > w_down.ndim:  # [L, H, 2, F]
        up = (compat.join_last_axes(jnp.asarray(up[0])),)
    layouts = functools.partial(
        quantize_layouts,
        operation,
        recipe=quantization,
        backward=not isinstance(quantization, WeightsOnly),
        implementation=implementation,
    )
    return QuantizedWeights(*layouts(up)), QuantizedWeights(*layouts((w_down,)))


def experts_from_checkpoint(
    w_up: Quantized | tuple[Quantized, Quantized], w_down: Quantized
) -> QuantizedExperts:
    """Takes the matrices of a quantized checkpoint as they are, [L, out, in], for inference.

    Linear layers in torch have that layout, and kernels read it. Values and scales are neither
    rounded nor transposed. Gate and up are joined, by numpy if their arrays are numpy's, so that no
    device holds all experts. JAX's arrays keep their sharding over L.

    For example::

        gate, up, down = (
            quant.Quantized(values, scales, quant.Fp8Block128()) for values, scales in in_files
        )
        quantized = quant.experts_from_checkpoint((gate, up), down)

    Args:
      w_up: [L, F, H] for a plain activation; for a gated one a (gate, up) pair of them, or
        [L, 2F, H] with the gate first.
      w_down: [L, H, F].

    Returns:
      The `quantized_weights` for `moe_mlp`, `grouped_mlp` and `MoE`, without the layout of the
      backward pass.

    Raises:
      ArgumentError (a ValueError): a pair whose shapes or formats differ, or whose blocks do not
        end where the gate ends.
      DtypeError (a TypeError): anything but quantized arrays in the format's dtypes.
    """
    operation = "quant.experts_from_checkpoint"
    parts = tuple(w_up) if isinstance(w_up, tuple | list) else (w_up,)
    for name, part in (*(("w_up", part) for part in parts), ("w_down", w_down)):
        if not isinstance(part, Quantized):
            raise DtypeError(
                f"jax_ep.{operation}: {name} is a {type(part).__name__}; expected a "
                "jax_ep.quant.Quantized. Give values and scales: Quantized(weight, "
                "weight_scale_inv, Fp8Block128())."
            )
        check(operation, part)
        check_no_tensor_scale(operation, part.format)
        checks.shape(operation, name, part.values, ("experts", "out", "in"))
    return QuantizedWeights(_joined(operation, parts)), QuantizedWeights(w_down)


def _joined(operation: str, parts: tuple[Quantized, ...]) -> Quantized:
    if len(parts) == 1:
        return parts[0]
    shapes, formats = [part.shape for part in parts], {part.format for part in parts}
    if len(parts) != 2 or len({*shapes}) > 1 or len(formats) > 1:
        raise ArgumentError(
            f"jax_ep.{operation}: w_up has parts of shapes {shapes} and formats {formats}; "
            "expected gate and up alike. Give a pair, or one array for a plain activation."
        )
    gate, _ = parts
    if gate.shape[1] % gate.block_shape[1]:
        raise ArgumentError(
            f"jax_ep.{operation}: gate and up have F={gate.shape[1]} with blocks of "
            f"{gate.block_shape[1]}; expected a multiple, as joined arrays have no partial block "
            "inside. Dequantize them, and use quantize_experts."
        )
    found: dict[str, Any] = {}
    for name in "values", "scales":
        arrays = [getattr(part, name) for part in parts]
        on_host = all(isinstance(array, np.ndarray) for array in arrays)
        found[name] = (np if on_host else jnp).concatenate(arrays, axis=1)
    return Quantized(**found, format=gate.format)


def shapes_of_quantized(
    operation: str,
    rows: jax.Array,
    recipe: Recipe | None,
    quantized: QuantizedExperts | None,
    layer: Any,
    accumulators: Any = None,
) -> tuple[Any, Any]:
    """Returns the shapes of the float w_up and w_down for experts that have quantized ones only."""
    check_given(operation, None, quantized)
    check_no_layer(operation, layer)
    if recipe is None:
        check_no_quantized_weights(operation, "quantized_weights", quantized)
    check_recipe(operation, recipe)
    if accumulators is not None:
        raise ArgumentError(
            f"jax_ep.{operation}: accumulators are given without w_up and w_down; expected the "
            "matrices whose gradients they sum. Leave accumulators out."
        )
    assert recipe is not None and quantized is not None
    check_pair(operation, quantized)
    for which, one in zip(("up", "down"), quantized, strict=True):
        check_layouts(operation, f"quantized_weights ({which})", one, recipe)
    return _shapes_of_floats(quantized, rows.dtype)


def _shapes_of_floats(quantized: QuantizedExperts, dtype: Any) -> tuple[Any, Any]:
    def shape_of(values: jax.Array) -> Any:
        return compat.struct_like(values, values.shape[:1] + values.shape[:0:-1], dtype)

    up, down = (shape_of(one.forward.values) for one in quantized)
    return up, down


def weights_only_experts(
    operation: str,
    rows: jax.Array,
    matrices: tuple[Any, Any],
    quantization: WeightsOnly,
    quantized: QuantizedExperts | None,
    layer: Any,
    *,
    needs_floats: bool = False,
) -> tuple[Any, Any, QuantizedExperts | None]:
    """Returns w_up [L, H, N] and w_down [L, F, H] in the rows' dtype, and what a kernel reads.

    Where a kernel reads quantized matrices, the float ones are shapes alone, unless they are
    needed. `matrices` must be None.
    """
    if any(matrix is not None for matrix in matrices):
        raise ArgumentError(
            f"jax_ep.{operation}: w_up and w_down are given with {quantization}; expected None, as "
            "quantized_weights have the matrices. Leave one of both out."
        )
    check_given(operation, None, quantized)
    check_no_layer(operation, layer)
    check_pair(operation, quantized)
    assert quantized is not None
    for which, one in zip(("up", "down"), quantized, strict=True):
        check_layouts(operation, f"quantized_weights ({which})", one, quantization)
    in_four_bits = None if needs_floats else kernel_weights(rows, quantized)
    if in_four_bits is None:
        return *dequantized(quantized, rows.dtype), None
    return *_shapes_of_floats(in_four_bits, rows.dtype), in_four_bits


def with_quantized(operation: str, experts: Experts, quantized: QuantizedExperts | None) -> Experts:
    """The experts with quantized matrices, if there are any; float ones that are shapes go."""
    if quantized is None:
        return experts
    experts = experts._replace(quantized=constant(operation, "quantized_weights", quantized))
    if isinstance(experts.w_up, jax.ShapeDtypeStruct):
        experts = experts._replace(w_up=None, w_down=None)  # type: ignore[arg-type]
    return experts


def check_given(operation: str, w_up: Any, quantized: Any) -> None:
    """Raises unless a call has matrices."""
    if w_up is None and quantized is None:
        raise ArgumentError(
            f"jax_ep.{operation}: neither w_up and w_down nor quantized_weights are given; "
            "expected one of both. Give the quantized_weights of a checkpoint, as "
            "jax_ep.quant.experts_from_checkpoint returns them."
        )


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
    check_recipe(operation, recipe)
    check_row_dtype(operation, rows_name, rows)
    if experts is None:
        other = "experts_fn"
    elif not isinstance(activation, NamedActivation):
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
