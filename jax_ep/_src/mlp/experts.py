"""The parameters of experts, in the form of the matmuls."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep._src.core import checks, compat
from jax_ep._src.core.errors import ArgumentError, DtypeError
from jax_ep._src.core.expert_axis import ExpertAxis
from jax_ep._src.matmul.accumulation import NO_ACCUMULATORS, Accumulation, Accumulators, pass_on
from jax_ep._src.matmul.activations import Activation, NamedActivation
from jax_ep._src.matmul.layer_stack import (
    LayerIndex,
    check_index,
    check_stacks,
    flatten,
    sizes_in_stack,
)
from jax_ep._src.mlp.expert_forms import (
    UpBiases,
    UpWeights,
    check_activation,
    check_down,
    check_forms,
    flat_function,
    flatten_forms,
    kind_of,
)
from jax_ep._src.quant.quantized import Quantized
from jax_ep._src.quant.recipe import QuantizedExperts


class Experts(NamedTuple):
    """The parameters of the experts of one rank; L of them, H hidden size, F intermediate size."""

    w_up: jax.Array  # [L, H, N], N = 2F (gate, up) for a gated activation, otherwise F
    w_down: jax.Array  # [L, F, H]; both are None where quantized ones have no float matrices
    b_up: jax.Array | None  # float32[L, N]
    b_down: jax.Array | None  # float32[L, H]
    accumulators: Accumulators = NO_ACCUMULATORS
    quantized: QuantizedExperts | None = None  # constants, by the layer's recipe or WeightsOnly
    layer: jax.Array | None = None  # int32[]: then the L groups are those of all layers

    @property
    def parameters(self) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
        """The arrays that have gradients."""
        return self.w_up, self.w_down, self.b_up, self.b_down

    @property
    def multiplied(self) -> tuple[jax.Array | Quantized, jax.Array | Quantized]:
        """Returns what matmuls without a recipe read, quantized matrices if there are any."""
        if self.quantized is None:
            return self.w_up, self.w_down
        up, down = self.quantized
        return up.forward, down.forward

    def group_sizes(self, of_layer: jax.Array) -> jax.Array:
        """Returns the sizes of all L groups, from those of the layer's."""
        if self.layer is None:
            return of_layer
        return sizes_in_stack(of_layer, self.w_up.shape[0] // of_layer.shape[0], self.layer)

    def passed_on(self, accumulation: Accumulation, result: jax.Array) -> Accumulators:
        """Returns the accumulators for a later call than that of `result`."""
        return pass_on(self.accumulators, result) if accumulation.passes_on else NO_ACCUMULATORS

    def without_accumulators(self) -> Experts:
        """Returns what a backward pass keeps: stand-ins would be kept as arrays."""
        return self._replace(accumulators=NO_ACCUMULATORS)


def gradient_of_experts(
    accumulation: Accumulation,
    w_up: jax.Array | None,
    w_down: jax.Array | None,
    b_up: jax.Array | None,
    b_down: jax.Array | None,
) -> Any:
    """Returns the cotangent of `Experts`: gradients of matrices are results, or accumulators."""
    if accumulation is Accumulation.NONE:
        return Experts(w_up, w_down, b_up, b_down)  # type: ignore[arg-type]
    return Experts(None, None, b_up, b_down, Accumulators(w_up, w_down))  # type: ignore[arg-type]


def check_experts(
    operation: str,
    rows_name: str,
    rows: jax.Array,
    w_up: UpWeights,
    w_down: jax.Array,
    b_up: UpBiases,
    b_down: jax.Array | None,
    activation: Activation,
    layer: LayerIndex | None = None,
) -> tuple[Experts, Activation]:
    """The parameters in the form of the matmuls, and the activation: its name, or [M, N] -> [M, F].

    The activation's name decides whether w_up is gated; for a function the shapes decide. With a
    layer all parameters are stacks, of which L is then the experts of all layers.
    """
    index = None
    if layer is not None:
        *stacks, index = _flat_stacks(operation, layer, w_up, w_down, b_up, b_down)
        w_up, w_down, b_up, b_down = stacks
    is_gated = check_activation(operation, activation)
    hidden = rows.shape[1]
    check_down(operation, w_down, hidden)
    num_local, size, _ = w_down.shape
    kind = kind_of(activation)
    lead = num_local, hidden
    matrices, is_gated = check_forms(operation, "w_up", w_up, lead, size, is_gated, kind)
    up = flatten_forms(matrices, lead)
    for name, matrix in ("w_up", up), ("w_down", w_down):
        checks.matrix_dtype(operation, name, matrix, rows_name, rows)
    if b_up is not None:
        biases, _ = check_forms(operation, "b_up", b_up, lead[:1], size, is_gated, kind)
        b_up = flatten_forms(biases, lead[:1])
        b_up = checks.weights(operation, "b_up", b_up, (num_local, up.shape[2]))
    if b_down is not None:
        b_down = checks.weights(operation, "b_down", b_down, (num_local, hidden))
    experts = Experts(up, w_down, b_up, b_down, layer=index)
    if isinstance(activation, NamedActivation):
        return experts, activation
    return experts, flat_function(operation, activation, size, is_gated)


def check_num_experts(
    operation: str,
    experts: Experts,
    axis: ExpertAxis,
    num_experts: int | None,
    num_layers: int | None = None,
) -> int:
    """E, which the weights of one rank have to fit; all layers have as many.

    Without `num_experts`, weights that are the same on all ranks are an error: every rank would
    hold the experts of rank 0, and no token would go anywhere else. So it is needed where
    `shard_map` does not tell.
    """
    num_local = experts.w_up.shape[0] // (num_layers or 1)
    spec = repr(axis.name) if num_layers is None else f"None, {axis.name!r}"
    if num_experts is not None:
        num_experts = checks.num_experts(operation, num_experts, axis)
        if num_local * axis.size != num_experts:
            raise ArgumentError(
                f"jax_ep.{operation}: w_up has {num_local} experts with num_experts={num_experts}; "
                f"expected {num_experts // axis.size} on each of {axis.size} ranks. Shard the "
                f"weights over the axis: in_specs=PartitionSpec({spec}) splits them."
            )
        return num_experts
    sizes = dict(axis.mesh_shape)
    split_over = {name for name in axis.names if sizes[name] > 1}
    if split_over and not compat.tracks_varying_axes(axis.names):
        raise ArgumentError(
            f"jax_ep.{operation}: num_experts is not given under check_vma=False, where weights "
            "that are the same on all ranks cannot be told from each rank's own; expected the "
            f"experts of all ranks. Give num_experts={num_local * axis.size} if each of the "
            f"{axis.size} ranks has {num_local} of its own, or leave check_vma=True."
        )
    for name, matrix in ("w_up", experts.w_up), ("w_down", experts.w_down):
        missing = split_over - compat.varying_axes(matrix)
        if missing:
            raise ArgumentError(
                f"jax_ep.{operation}: {name} of shape {matrix.shape} is the same on all ranks "
                f"of axis {min(missing)!r}; expected each rank's own experts. Shard the "
                f"weights over the axis: in_specs=PartitionSpec({spec}) splits them. Or "
                "give num_experts, if ranks do hold equal experts."
            )
    return num_local * axis.size


# ---- stacks of layers, and chains of calls


def with_accumulators(operation: str, experts: Experts, accumulators: Accumulators) -> Experts:
    """Returns the experts of a call in a chain, to which their matrices' gradients belong."""
    if not isinstance(accumulators, Accumulators):
        raise DtypeError(
            f"jax_ep.{operation}: accumulators is a {type(accumulators).__name__}; expected "
            "jax_ep.Accumulators. Give jax_ep.accumulators(w_up, w_down) of the same matrices, or "
            "what the call before returned."
        )
    for name, array in accumulators._asdict().items():
        checks.array(operation, f"accumulators.{name}", array)
        shape = getattr(experts, name).shape
        if array.shape != shape or array.dtype != jnp.float32:
            raise ArgumentError(
                f"jax_ep.{operation}: accumulators.{name} has shape {array.shape} and dtype "
                f"{array.dtype}; expected {shape} and float32. Give jax_ep.accumulators(w_up, "
                "w_down) of the same matrices, or what the call before returned."
            )
    up, down = jax.lax.stop_gradient((experts.w_up, experts.w_down))
    return experts._replace(w_up=up, w_down=down, accumulators=accumulators)


def _flat_stacks(operation: str, layer: LayerIndex, *given: Any) -> tuple[Any, ...]:
    """Returns the parameters with the experts of all layers in one dimension, and the index."""
    stacks: dict[str, Any] = {}
    for name, arrays in zip(("w_up", "w_down", "b_up", "b_down"), given, strict=True):
        if isinstance(arrays, tuple | list):
            stacks |= {f"{name}[{i}]": array for i, array in enumerate(arrays)}
        elif arrays is not None:
            stacks[name] = arrays
    index = check_index(operation, layer, check_stacks(operation, stacks))
    return *jax.tree.map(flatten, given), index
