"""A mixture-of-experts layer for flax.nnx, called at the level of `jit`.

The layer opens its own `jax.shard_map`, so that the model around it needs to know of nothing but
the mesh. Parameters carry their partition specs as nnx metadata (``out_sharding``).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jax_ep import routing
from jax_ep._src import moe_mlp
from jax_ep._src.activations import GATED_ACTIVATIONS, Activation
from jax_ep._src.errors import ArgumentError
from jax_ep._src.mesh import AxisName

Router = Callable[[jax.Array, int], routing.Routing]
ROUTERS: dict[str, Router] = {"softmax": routing.softmax_topk, "sigmoid": routing.sigmoid_topk}


class MoEStats(NamedTuple):
    """What a call reports beside its output, over all tokens of all ranks.

    Attributes:
      aux_loss: f32[], `routing.balancing_loss`: 1 when the load is even. Not scaled.
      z_loss: f32[], `routing.z_loss`. Not scaled.
      expert_load: i32[E], the choices each expert got, dropped ones included.
      num_dropped: i32[], the choices dropped for want of capacity; 0 when dropless.
    """

    aux_loss: jax.Array
    z_loss: jax.Array
    expert_load: jax.Array
    num_dropped: jax.Array


class MoE(nnx.Module):
    """Router, experts, and the exchange between them.

    Where the layer runs follows from the mesh in context (`jax.set_mesh`), each time it is called:

    * A mesh with the expert axis, of Auto or Explicit axes: experts are sharded over the expert
      axis, tokens over `batch_axes`.
    * Inside a `shard_map` in which the expert axis is manual: parameters and x are the local views
      there, by the specs in the parameters' metadata, and nothing is resharded.
    * No mesh, or one without the expert axis: every rank holds all experts.

    Losses, loads and their gradients are those of all tokens, and parameters are initialised
    equally, whatever the mesh.

    Attributes:
      router_kernel: param [hidden, num_experts].
      w_up: param [num_experts, hidden, 2, expert_hidden] (gate, up) for a gated activation,
        [num_experts, hidden, expert_hidden] for a plain one.
      w_down: param [num_experts, expert_hidden, hidden].
    """

    def __init__(
        self,
        hidden: int,
        expert_hidden: int,
        num_experts: int,
        top_k: int,
        *,
        expert_axis: AxisName = "expert",
        batch_axes: tuple[str, ...] = ("data", "expert"),
        fsdp_axis: str | None = None,
        tensor_axis: str | None = None,
        router: str | Router = "softmax",
        activation: Activation = "swiglu",
        capacity_factor: float | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Initialises the parameters, sharded over the mesh in context if there is one.

        Args:
          hidden: H, the size of a token.
          expert_hidden: F, the inner size of an expert.
          num_experts: E; a multiple of the size of the expert axis.
          top_k: K, the experts a token goes to.
          expert_axis: the mesh axis, or axes, that the experts are sharded over.
          batch_axes: the mesh axes that the leading dimension of x is sharded over. Those that the
            mesh lacks are ignored. The expert axis and `fsdp_axis` always count among them.
          fsdp_axis: the mesh axis that the weights' H is sharded over too. They are gathered for
            use, and their gradients reduce-scattered.
          tensor_axis: the mesh axis that F is sharded over. Tokens are replicated over it, and the
            experts' outputs summed.
          router: ``"softmax"``, ``"sigmoid"`` (`jax_ep.routing`), or a function from float32 logits
            [T, E] and K to `routing.Routing`.
          activation: as in `moe_mlp`; a function is taken for a plain one.
          capacity_factor: how many times its even share a rank can receive; see
            `routing.recv_capacity`. None drops nothing.
          dtype: the dtype that experts compute in and return; None for x's. Routing is float32.
          param_dtype: the dtype of the parameters. float32 weights stay so with a narrower dtype:
            their gradients then are float32 as well.
          rngs: gives the keys of the parameters.

        Raises:
          ArgumentError (a ValueError): sizes that the mesh in context does not divide, a tensor
            axis among the batch axes, or an unknown router.
        """
        if isinstance(router, str) and router not in ROUTERS:
            raise ArgumentError(
                f"jax_ep.nnx.MoE: router={router!r}; expected one of {tuple(ROUTERS)}, or a "
                "function from logits and top_k to jax_ep.routing.Routing."
            )
        expert_axes = (expert_axis,) if isinstance(expert_axis, str) else tuple(expert_axis)
        fsdp = () if fsdp_axis is None else (fsdp_axis,)
        tensor = () if tensor_axis is None else (tensor_axis,)
        self.config = _Config(
            hidden=hidden,
            expert_hidden=expert_hidden,
            num_experts=num_experts,
            top_k=top_k,
            axes=_Axes(
                tokens=tuple(dict.fromkeys((*batch_axes, *expert_axes, *fsdp))),
                expert=expert_axes,
                fsdp=fsdp,
                tensor=tensor,
            ),
            router=ROUTERS[router] if isinstance(router, str) else router,
            activation=activation,
            is_gated=isinstance(activation, str) and activation in GATED_ACTIVATIONS,
            capacity_factor=capacity_factor,
            dtype=None if dtype is None else jnp.dtype(dtype),
        )
        mesh = jax.sharding.get_abstract_mesh()
        _check_sizes(self.config, mesh)
        specs = self.config.axes.within(mesh.axis_names).param_specs(self.config.is_gated)
        gated = (2,) if self.config.is_gated else ()
        shapes = (
            (hidden, num_experts),
            (num_experts, hidden, *gated, expert_hidden),
            (num_experts, expert_hidden, hidden),
        )
        # Flax shards at creation over meshes of one kind of axes; elsewhere specs are for later.
        shard_now = len(set(mesh.axis_types)) == 1 and not mesh.manual_axes
        self.router_kernel, self.w_up, self.w_down = (
            nnx.Param(
                _initialize(rngs.params(), shape, jnp.dtype(param_dtype)),
                out_sharding=tuple(spec),
                eager_sharding=shard_now,
            )
            for shape, spec in zip(shapes, specs, strict=True)
        )

    def __call__(self, x: jax.Array) -> tuple[jax.Array, MoEStats]:
        """Routes the tokens, and sums the outputs of each one's experts by the router's weights.

        Args:
          x: [..., H] with at least one dimension before H. The first one is sharded over the batch
            axes.

        Returns:
          y, of x's shape, in `dtype`, and `MoEStats`. With Explicit axes y is sharded as x is.

        Raises:
          ArgumentError (a ValueError): a shape that does not fit the layer or the mesh.
        """
        return _apply(self.config, self.router_kernel[...], self.w_up[...], self.w_down[...], x)


# ---- what does not change between calls


@dataclasses.dataclass(frozen=True)
class _Axes:
    """Mesh axes by what is sharded over them; those that do not exist are left out."""

    tokens: tuple[str, ...]
    expert: tuple[str, ...]
    fsdp: tuple[str, ...]
    tensor: tuple[str, ...]

    def within(self, names: tuple[str, ...] | frozenset[str]) -> _Axes:
        groups = (self.tokens, self.expert, self.fsdp, self.tensor)
        return _Axes(*(tuple(n for n in group if n in names) for group in groups))

    def param_specs(self, is_gated: bool) -> tuple[P, P, P]:
        """The specs of router_kernel, w_up and w_down."""
        expert, fsdp, tensor = map(_entry, (self.expert, self.fsdp, self.tensor))
        gated = (None,) if is_gated else ()
        return P(None, None), P(expert, fsdp, *gated, tensor), P(expert, tensor, fsdp)


def _entry(names: tuple[str, ...]) -> str | tuple[str, ...] | None:
    """What a partition spec has for a dimension sharded over these axes."""
    return names[0] if len(names) == 1 else names or None


@dataclasses.dataclass(frozen=True)
class _Config:
    """Everything static about a layer, hashed by value."""

    hidden: int
    expert_hidden: int
    num_experts: int
    top_k: int
    axes: _Axes
    router: Router
    activation: Activation
    is_gated: bool
    capacity_factor: float | None
    dtype: Any


@functools.partial(jax.jit, static_argnums=(1, 2))
def _initialize(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Lecun's normal initialisation, for each expert, and for gate and up, by themselves."""
    in_axis = 0 if len(shape) == 2 else 1
    others = tuple(axis for axis in range(len(shape) - 1) if axis != in_axis)
    initializer = nnx.initializers.lecun_normal(in_axis=in_axis, batch_axis=others)
    return initializer(key, shape, dtype)


# ---- the call


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _apply(
    config: _Config, router_kernel: jax.Array, w_up: jax.Array, w_down: jax.Array, x: jax.Array
) -> tuple[jax.Array, MoEStats]:
    """`_layer` in the mesh in context. Under `jit`, because abstract meshes need it."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        names = config.axes.expert
        mesh = AbstractMesh((1,) * len(names), names, axis_types=(AxisType.Auto,) * len(names))
    _check_sizes(config, mesh)
    _check_input(config, x)
    params = (router_kernel, w_up, w_down)
    axes = config.axes.within(mesh.axis_names)
    _check_axes(mesh, axes, config.axes)
    if set(axes.expert or axes.tokens) <= set(mesh.manual_axes):
        return _layer(config, axes.within(frozenset(mesh.manual_axes)), *params, x)

    still_whole = frozenset(mesh.axis_names) - frozenset(mesh.manual_axes)
    outside = axes.within(still_whole)
    _check_batch(x, mesh, outside.tokens)
    tokens_spec = P(outside.tokens, *(None,) * (x.ndim - 1))
    in_specs = (*outside.param_specs(config.is_gated), tokens_spec)
    sharded_layer = jax.shard_map(
        functools.partial(_layer, config, axes),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=(tokens_spec, P()),
        axis_names=still_whole,
    )
    y, stats = sharded_layer(*map(_reshard, (*params, x), in_specs))
    return _reshard(y, jax.typeof(x).sharding.spec), stats


def _layer(
    config: _Config,
    axes: _Axes,
    router_kernel: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    x: jax.Array,
) -> tuple[jax.Array, MoEStats]:
    """The layer on one rank: x is this rank's tokens, the weights this rank's shards."""
    tokens = x.reshape(-1, x.shape[-1])
    logits = jnp.dot(
        tokens.astype(jnp.float32),
        router_kernel.astype(jnp.float32),
        precision=lax.Precision.HIGHEST,  # TF32 would choose other experts
    )
    ids, weights, probabilities = config.router(logits, config.top_k)

    exchange, sent_ids, recv_capacity = axes.expert, ids, None
    if not exchange:
        # Every rank has copies of all experts. As experts of their own they are addressed here.
        exchange = axes.tokens
        first_id = lax.axis_index(exchange) * config.num_experts
        sent_ids = jnp.where(ids >= 0, first_id + ids, -1)
        recv_capacity = ids.size
    elif config.capacity_factor is not None:
        recv_capacity = routing.recv_capacity(
            len(tokens),
            config.top_k,
            num_experts=config.num_experts,
            num_ranks=lax.axis_size(exchange),
            capacity_factor=config.capacity_factor,
        )
    dtype = config.dtype or x.dtype
    if axes.fsdp:
        w_up = lax.all_gather(w_up, axes.fsdp, axis=1, tiled=True)
        w_down = lax.all_gather(w_down, axes.fsdp, axis=2, tiled=True)
    y, plan = moe_mlp.moe_mlp(
        tokens.astype(dtype),
        sent_ids,
        weights,
        *(w if w.dtype == jnp.float32 else w.astype(dtype) for w in (w_up, w_down)),
        axis_name=exchange,
        activation=config.activation,
        recv_capacity=recv_capacity,
    )
    assert not isinstance(plan, tuple)
    num_dropped = lax.psum(plan.num_dropped[0], axes.tokens)
    if axes.tensor:
        y = lax.psum(y, axes.tensor)
        num_dropped = lax.pmax(num_dropped, axes.tensor)  # equal on all of them
    stats = MoEStats(
        aux_loss=routing.balancing_loss(probabilities, ids, axis_name=axes.tokens),
        z_loss=routing.z_loss(logits, axis_name=axes.tokens),
        expert_load=routing.load(ids, config.num_experts, axis_name=axes.tokens),
        num_dropped=num_dropped,
    )
    return y.reshape(x.shape), stats


def _reshard(x: jax.Array, spec: P) -> jax.Array:
    """Reshards x by the Explicit axes of `spec`; Auto ones are the compiler's business."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if AxisType.Explicit not in kinds.values():
        return x
    entries = (e if isinstance(e, tuple) else (e,) for e in spec)
    kept = (tuple(n for n in e if kinds.get(n) == AxisType.Explicit) for e in entries)
    return jax.sharding.reshard(x, P(*(e or None for e in kept)))


# ---- checks


def _check_sizes(config: _Config, mesh: AbstractMesh) -> None:
    axes = config.axes
    if set(axes.tensor) & set(axes.tokens):
        raise ArgumentError(
            f"jax_ep.nnx.MoE: tensor_axis={axes.tensor[0]!r} is one of the axes {axes.tokens} that "
            "tokens are sharded over. Give an axis of its own, or leave it out of batch_axes."
        )
    shapes = dict(mesh.shape)
    for name, size, over in (
        ("num_experts", config.num_experts, axes.expert),
        ("hidden", config.hidden, axes.fsdp),
        ("expert_hidden", config.expert_hidden, axes.tensor),
    ):
        parts = math.prod(shapes.get(axis, 1) for axis in over)
        if size % parts:
            raise ArgumentError(
                f"jax_ep.nnx.MoE: {name}={size} does not divide over the {parts} parts of mesh "
                f"axis {over}. Use {-(-size // parts) * parts}, or a mesh that divides {size}."
            )


def _check_input(config: _Config, x: jax.Array) -> None:
    if x.ndim < 2 or x.shape[-1] != config.hidden:
        raise ArgumentError(
            f"jax_ep.nnx.MoE: x has shape {x.shape}; expected [..., {config.hidden}] with at least "
            "one dimension of tokens before the last."
        )


def _check_axes(mesh: AbstractMesh, axes: _Axes, wanted: _Axes) -> None:
    if not axes.tokens:
        raise ArgumentError(
            f"jax_ep.nnx.MoE: the mesh in context has the axes {mesh.axis_names}; expected one or "
            f"several of {wanted.tokens}, over which tokens are sharded. Add one, of size 1 if "
            "need be, or name the mesh's in batch_axes."
        )


def _check_batch(x: jax.Array, mesh: AbstractMesh, axes: tuple[str, ...]) -> None:
    parts = math.prod(mesh.shape[axis] for axis in axes)
    if x.shape[0] % parts:
        raise ArgumentError(
            f"jax_ep.nnx.MoE: the leading dimension of x, {x.shape[0]}, does not divide over the "
            f"{parts} ranks of the mesh axes {axes}. Use a batch that is a multiple of {parts}, "
            "reshape x to [tokens, hidden] if that divides, or shard over fewer batch_axes."
        )
