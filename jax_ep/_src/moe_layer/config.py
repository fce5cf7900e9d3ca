"""The static configuration of a layer, with the checks of its constructor."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jax_ep._src import checks
from jax_ep._src.activations import GATED_ACTIVATIONS, Activation
from jax_ep._src.errors import ArgumentError
from jax_ep._src.experts import check_activation
from jax_ep._src.mesh import AxisName
from jax_ep._src.moe_layer.router import NAMED_ROUTERS, Router

LAYER = "nnx.MoE"


@dataclasses.dataclass(frozen=True)
class Axes:
    """Mesh axes, by what is sharded over them. Those that do not exist are left out."""

    tokens: tuple[str, ...]
    expert: tuple[str, ...]
    fsdp: tuple[str, ...]
    tensor: tuple[str, ...]

    def within(self, names: tuple[str, ...] | frozenset[str]) -> Axes:
        """The axes that are among `names`."""
        groups = (self.tokens, self.expert, self.fsdp, self.tensor)
        return Axes(*(tuple(n for n in group if n in names) for group in groups))

    def param_specs(self, is_gated: bool) -> tuple[P, P, P]:
        """The specs of router_kernel, w_up and w_down."""
        expert, fsdp, tensor = map(_entry, (self.expert, self.fsdp, self.tensor))
        gated = (None,) if is_gated else ()
        return P(None, None), P(expert, fsdp, *gated, tensor), P(expert, tensor, fsdp)


def _entry(names: tuple[str, ...]) -> str | tuple[str, ...] | None:
    """The entry of a partition spec for a dimension that is sharded over these axes."""
    return names[0] if len(names) == 1 else names or None


@dataclasses.dataclass(frozen=True)
class Config:
    """The static properties of a layer, hashed by value.

    `router` is a name, or None for a router that the layer keeps beside the configuration.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    mesh: Mesh | AbstractMesh | None
    axes: Axes
    router: str | None
    activation: Activation
    is_gated: bool
    capacity_factor: float | None
    num_comm_sms: int | None
    implementation: str | None
    dtype: Any


def make_config(
    *,
    hidden_size: int,
    intermediate_size: int,
    num_experts: int,
    top_k: int,
    mesh: Mesh | AbstractMesh | None,
    expert_axis: AxisName | None,
    batch_axes: tuple[str, ...],
    fsdp_axis: str | None,
    tensor_axis: str | None,
    router: str | Router,
    activation: Activation,
    capacity_factor: float | None,
    num_comm_sms: int | None,
    implementation: str | None,
    dtype: DTypeLike | None,
) -> Config:
    """Checks the arguments of a layer's constructor."""
    sizes = {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_experts": num_experts,
        "top_k": top_k,
    }
    for name, size in sizes.items():
        checks.integer(LAYER, name, size)
    if top_k > num_experts:
        raise ArgumentError(
            f"jax_ep.{LAYER}: top_k={top_k} with num_experts={num_experts}; expected at most one "
            "assignment per expert. Give a smaller top_k, or more experts."
        )
    if not (callable(router) or router in NAMED_ROUTERS):
        raise ArgumentError(
            f"jax_ep.{LAYER}: router={router!r}; expected one of {tuple(NAMED_ROUTERS)}, or a "
            "function from logits and top_k to jax_ep.routing.Routing."
        )
    check_activation(LAYER, activation)
    checks.capacity(LAYER, capacity_factor=capacity_factor)
    checks.num_sms(LAYER, num_comm_sms, "num_comm_sms")
    checks.implementation(LAYER, implementation)
    expert = () if expert_axis is None else _names(expert_axis)
    fsdp = () if fsdp_axis is None else (fsdp_axis,)
    tensor = () if tensor_axis is None else (tensor_axis,)
    axes = Axes(
        tokens=tuple(dict.fromkeys((*_names(batch_axes), *expert, *fsdp))),
        expert=expert,
        fsdp=fsdp,
        tensor=tensor,
    )
    if set(axes.tensor) & set(axes.tokens):
        raise ArgumentError(
            f"jax_ep.{LAYER}: tensor_axis={tensor_axis!r} is one of the axes {axes.tokens} that "
            "tokens are sharded over. Give an axis of its own, or leave it out of batch_axes."
        )
    return Config(
        **sizes,
        mesh=mesh,
        axes=axes,
        router=router if isinstance(router, str) else None,
        activation=activation,
        is_gated=isinstance(activation, str) and activation in GATED_ACTIVATIONS,
        capacity_factor=capacity_factor,
        num_comm_sms=num_comm_sms,
        implementation=implementation,
        dtype=None if dtype is None else jnp.dtype(dtype),
    )


def _names(axes: AxisName) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


def check_mesh(config: Config, mesh: Mesh | AbstractMesh) -> None:
    """Raises unless the layer can be laid out over `mesh`."""
    wanted, axes = config.axes, config.axes.within(mesh.axis_names)
    if axes.expert != wanted.expert:
        raise ArgumentError(
            f"jax_ep.{LAYER}: the mesh has the axes {mesh.axis_names}; expected the expert axis "
            f"{_entry(wanted.expert)!r} among them. Give the mesh this axis, name another one with "
            "expert_axis=, or give expert_axis=None if every rank is to hold all experts."
        )
    if not axes.tokens:
        raise ArgumentError(
            f"jax_ep.{LAYER}: the mesh has the axes {mesh.axis_names}; expected one or several of "
            f"{wanted.tokens}, over which tokens are sharded. Add one, of size 1 if need be, or "
            "name the mesh's in batch_axes."
        )
    shape = dict(mesh.shape)
    for name, size, over in (
        ("num_experts", config.num_experts, axes.expert),
        ("hidden_size", config.hidden_size, axes.fsdp),
        ("intermediate_size", config.intermediate_size, axes.tensor),
    ):
        shards = math.prod(shape[axis] for axis in over)
        if size % shards:
            raise ArgumentError(
                f"jax_ep.{LAYER}: {name}={size} does not divide over the {shards} shards of mesh "
                f"axis {over}. Use {-(-size // shards) * shards}, or a mesh that divides {size}."
            )


def check_input(config: Config, x: Any, token_mask: Any) -> None:
    """Raises unless x has tokens of the layer's hidden size, and the mask fits."""
    checks.array(LAYER, "x", x)
    if x.ndim < 2 or x.shape[-1] != config.hidden_size:
        raise ArgumentError(
            f"jax_ep.{LAYER}: x has shape {x.shape}; expected [..., {config.hidden_size}] with at "
            "least one dimension of tokens before the last."
        )
    if token_mask is not None:
        checks.shape(LAYER, "token_mask", token_mask, x.shape[:-1])


def check_batch(x: Any, mesh: Mesh | AbstractMesh, axes: tuple[str, ...]) -> None:
    """Raises unless the leading dimension of x divides over the token axes."""
    shards = math.prod(mesh.shape[axis] for axis in axes)
    if x.shape[0] % shards:
        raise ArgumentError(
            f"jax_ep.{LAYER}: the leading dimension of x, {x.shape[0]}, does not divide over the "
            f"{shards} ranks of the mesh axes {axes}. Use a batch that is a multiple of {shards}, "
            "reshape x to [tokens, hidden size] if that divides, or shard over fewer batch_axes."
        )
