"""The matrices of all layers in one array, of which a call uses those of one layer in place.

A stack [N, L, ...] of N layers is N * L groups to the matmuls. The groups of other layers have no
rows: nothing is sliced, and a gradient that is added to a stack leaves the other layers alone.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_ep._src.core import checks
from jax_ep._src.core.errors import ArgumentError, DtypeError

LayerIndex = int | jax.Array
"""An int, or an integer scalar on the device such as the index of a scan."""


def check_stacks(operation: str, stacks: dict[str, Any]) -> int:
    """Returns the number of layers, and raises unless all have as many."""
    for name, stack in stacks.items():
        checks.array(operation, name, stack)
    counts = {stack.shape[:1] for stack in stacks.values()}
    are_stacks = all(s.ndim >= (3 if name[:2] == "b_" else 4) for name, s in stacks.items())
    if len(counts) != 1 or not are_stacks:
        shapes = ", ".join(f"{name} {stack.shape}" for name, stack in stacks.items())
        raise ArgumentError(
            f"jax_ep.{operation}: layer is given, and the shapes are {shapes}; expected stacks of "
            "equally many layers, [layers, local experts, ...]. Stack all, or leave layer out."
        )
    ((num_layers,),) = counts
    return int(num_layers)


def check_index(operation: str, layer: Any, num_layers: int) -> jax.Array:
    """Returns the index as int32[]. One that is known only on the device is not compared."""
    if hasattr(layer, "dtype") and hasattr(layer, "shape"):
        if layer.shape or not jnp.issubdtype(layer.dtype, jnp.integer):
            raise DtypeError(
                f"jax_ep.{operation}: layer has shape {layer.shape} and dtype {layer.dtype}; "
                "expected an integer scalar. Give an int, or the index of a scan over "
                "jnp.arange(layers)."
            )
    elif checks.integer(operation, "layer", layer, least=0) >= num_layers:
        raise ArgumentError(
            f"jax_ep.{operation}: layer={layer} with {num_layers} layers; expected less. Layers "
            "are counted from 0."
        )
    return jnp.asarray(layer, jnp.int32)


def check_no_layer(operation: str, layer: LayerIndex | None) -> None:
    """Raises if a layer is given where stacks are not taken."""
    if layer is not None:
        raise ArgumentError(
            f"jax_ep.{operation}: layer is given with quantized operands or a quantization; "
            "expected float arrays alone. Give the arrays of the layer itself."
        )


def flatten(stack: jax.Array) -> jax.Array:
    """Returns [N * L, ...]: the groups of all layers, one layer after another."""
    return stack.reshape(-1, *stack.shape[2:])


def sizes_in_stack(group_sizes: jax.Array, num_layers: int, layer: jax.Array) -> jax.Array:
    """Returns int32[N * L], the sizes of the groups of all layers: 0 but for those of one.

    A layer that does not exist has no rows.
    """
    is_layer = jnp.arange(num_layers, dtype=layer.dtype) == layer
    return jnp.where(is_layer[:, None], group_sizes, 0).reshape(-1)
