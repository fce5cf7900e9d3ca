"""A layer's call: routing and experts inside a `shard_map` over the layer's mesh."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jax_ep._src.core import checks, compat
from jax_ep._src.core.traced import Traced, trace
from jax_ep._src.layer import router as layer_router
from jax_ep._src.layer import sharded_weights as quantized_experts
from jax_ep._src.layer.config import (
    Axes,
    Config,
    check_input,
    check_mesh,
    spec_entry,
)
from jax_ep._src.layer.functions import (
    CallSite,
    Functions,
    function_names,
    recording,
    replaying,
    trace_at,
    without_functions,
)
from jax_ep._src.layer.mesh import find_mesh
from jax_ep._src.layer.padded_experts import check_padding, local_padded
from jax_ep._src.layer.parameters import reshard, specs_of
from jax_ep._src.layer.router import LAYER, Router, SplitRouter
from jax_ep._src.layer.tokens import (
    flatten,
    pad,
    some_token,
    token_indices,
    token_spec,
    warn_of_repeated_work,
)
from jax_ep._src.matmul.accumulation import Accumulators
from jax_ep._src.mlp.quantized_experts import check_given
from jax_ep._src.moe.moe_mlp import moe_mlp
from jax_ep._src.quant.recipe import QuantizedExperts
from jax_ep._src.routing import losses, routers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class MoEStats:
    """Losses and counts of one call, over all tokens of all ranks. A pytree; members may be added.

    Attributes:
      aux_loss: f32[], `routing.balancing_loss`: 1 when the load is even. Not scaled.
      z_loss: f32[], `routing.z_loss`. Not scaled.
      expert_load: i32[E], the assignments to each expert, dropped ones included.
      num_dropped: i32[], the assignments dropped for want of capacity; 0 without one, if a
        token's experts are distinct.
    """

    aux_loss: jax.Array
    z_loss: jax.Array
    expert_load: jax.Array
    num_dropped: jax.Array


class RouterArrays(NamedTuple):
    """The arrays of a router that has no name."""

    own: list[Any]  # leaves of the pytree that it is
    closed_over: list[Any]


class LayerArrays(NamedTuple):
    """The arrays of a layer, and their specs. Those that a layer lacks are None.

    With `layer`, the experts' are stacks of layers, of which this one is used.
    """

    router_kernel: Any  # [H, E]
    w_up: Any = None  # [E, H, 2, F] or [E, H, F]
    w_down: Any = None  # [E, F, H]
    b_up: Any = None  # [E, 2, F] or [E, F]
    b_down: Any = None  # [E, H]
    shared_w_up: Any = None  # [H, 2, shared F] or [H, shared F]
    shared_w_down: Any = None  # [shared F, H]
    logits_bias: Any = None  # [E]
    selection_bias: Any = None  # [E]
    router: Any = None  # `RouterArrays` of one that has no name
    functions: Any = ()  # lists of arrays that the activation and experts_fn close over
    quantized: QuantizedExperts | None = None  # w_up and w_down, quantized
    layer: Any = None  # int32[]
    sums: Any = None  # `Accumulators` of one rank after another


Outputs = tuple[jax.Array, MoEStats, Accumulators | None]


@dataclasses.dataclass(frozen=True)
class _Layer:
    """A layer, by all that its program depends on beside arrays and mesh. Hashed by value."""

    config: Config
    router: Traced | None  # None for one that has a name
    functions: Functions = ()

    def __call__(
        self, axes: Axes, arrays: LayerArrays, x: jax.Array, token_mask: jax.Array | None
    ) -> Outputs:
        config = self.config
        if self.functions:
            config = replaying(config, self.functions, arrays.functions)
        return _local_layer(config, self.router, axes, arrays, x, token_mask)


def apply(
    config: Config,
    router: Router | None,
    arrays: LayerArrays,
    x: jax.Array,
    token_mask: jax.Array | None,
) -> Outputs:
    """Runs the layer. `router` is None for one that has a name, and `arrays` have none of it."""
    check_input(config, x, token_mask)
    # A stack of layers, say: one of them is called by stack(), or in a scan.
    router_shape = config.hidden_size, config.num_experts
    checks.shape(LAYER, "router_kernel", arrays.router_kernel, router_shape)
    check_given(LAYER, arrays.w_up, arrays.quantized)
    mesh = find_mesh(config, [*jax.tree.leaves(arrays), x])
    check_mesh(config, mesh)
    check_padding(config, mesh, arrays.w_down, axis=0 if arrays.layer is None else 1)
    warn_of_repeated_work(config, mesh, x)
    # Functions may close over state, so that each call traces them: nothing keeps a first trace.
    traced = None
    if router is not None:
        traced, arrays = _trace_router(config, mesh, router, arrays, x, token_mask)
    layer = _Layer(config, traced)
    if function_names(config):
        if any(compat.concrete(leaf) is None for leaf in jax.tree.leaves((arrays, x, token_mask))):
            run = jax.jit(functools.partial(_run, layer, mesh), inline=True)
            return run(arrays, x, token_mask)
        layer, arrays = _trace_functions(layer, mesh, arrays, x, token_mask)
    return _compiled(layer, mesh, arrays, x, token_mask)


def _trace_router(
    config: Config,
    mesh: Mesh | AbstractMesh,
    router: Router,
    arrays: LayerArrays,
    x: jax.Array,
    token_mask: jax.Array | None,
) -> tuple[Traced, LayerArrays]:
    """Calls the router once, and returns what it computes, and its arrays among the others."""
    split = SplitRouter(router)
    arrays = arrays._replace(router=RouterArrays(split.arrays, []))
    found: list[tuple[Traced, list[Any]]] = []

    def probe(axes: Axes, arrays: LayerArrays, x: jax.Array, token_mask: Any) -> None:
        def call(logits: jax.Array, bias: Any, own: list[Any], indices: jax.Array) -> Any:
            return layer_router.call_split(split, own, logits, config.top_k, bias, indices)

        *_, logits = _tokens_and_logits(config, arrays, x, token_mask)
        found.append(trace(call, *_router_arguments(axes, arrays, x, logits)))

    _probe(config, mesh, probe, arrays, x, token_mask)
    ((traced, constants),) = found
    return traced, arrays._replace(router=arrays.router._replace(closed_over=constants))


_sites: dict[Any, tuple[CallSite, ...]] = {}
"""By what is compiled, but for the functions: where the layer calls them."""


def _trace_functions(
    layer: _Layer,
    mesh: Mesh | AbstractMesh,
    arrays: LayerArrays,
    x: jax.Array,
    token_mask: jax.Array | None,
) -> tuple[_Layer, LayerArrays]:
    """Calls the functions, and returns what they compute, and the arrays they close over."""
    leaves, structure = jax.tree.flatten((arrays, x, token_mask))
    stripped = dataclasses.replace(layer, config=without_functions(layer.config))
    key = stripped, mesh, structure, tuple(map(jax.typeof, leaves))
    if key not in _sites:
        calls: dict[CallSite, None] = {}
        recorder = dataclasses.replace(layer, config=recording(layer.config, calls))
        jax.eval_shape(functools.partial(_run, recorder, mesh), arrays, x, token_mask)
        _sites[key] = tuple(calls)
    found: list[tuple[Functions, list[Any]]] = []

    def probe(*_: Any) -> None:
        found.append(trace_at(layer.config, _sites[key]))

    _probe(layer.config, mesh, probe, arrays, x, token_mask)
    ((functions, constants),) = found
    layer = dataclasses.replace(stripped, functions=functions)
    return layer, arrays._replace(functions=constants)


@dataclasses.dataclass(frozen=True)
class _Probe:
    """Runs a function on each rank in the place of a layer."""

    config: Config
    function: Callable[..., None]

    def __call__(self, axes: Axes, arrays: LayerArrays, x: jax.Array, token_mask: Any) -> Any:
        self.function(axes, arrays, x, token_mask)
        return x, None, None


def _probe(
    config: Config, mesh: Mesh | AbstractMesh, function: Callable[..., None], *given: Any
) -> None:
    """Traces `function` where the layer would run, and computes nothing."""
    jax.eval_shape(functools.partial(_run, _Probe(config, function), mesh), *given)


def _run(
    layer: _Layer | _Probe,
    mesh: Mesh | AbstractMesh,
    arrays: LayerArrays,
    x: jax.Array,
    token_mask: jax.Array | None,
) -> Outputs:
    """`layer`, in a `shard_map` unless the context already is one over the right axes."""
    config = layer.config
    axes = config.axes_on(mesh)
    manual = frozenset(mesh.abstract_mesh.manual_axes)
    if manual.issuperset(axes.all):
        return layer(axes.within(manual), arrays, x, token_mask)

    axis_names = frozenset(mesh.axis_names) - manual - compat.vmapped_explicit_axes()
    outer = axes.within(axis_names)
    to_spec = functools.partial(reshard, mesh)
    given, tokens = x, token_spec(x, mesh, outer)
    is_padded = tokens is None
    if tokens is None:
        tokens = P(spec_entry(outer.tokens))
        x, token_mask = flatten(
            to_spec(P(), x), None if token_mask is None else to_spec(P(), token_mask)
        )
        x, token_mask = pad(x, token_mask, math.prod(mesh.shape[axis] for axis in outer.tokens))
    param_specs = specs_of(config, outer, is_stack=arrays.layer is not None)
    by_rank = P(spec_entry(outer.all))
    specs = LayerArrays(
        **param_specs, selection_bias=P(), router=P(), functions=P(), layer=P(), sums=by_rank
    )
    compute: Callable[..., Outputs] = functools.partial(layer, axes)
    if (quantized := arrays.quantized) is not None:
        if arrays.layer is None:  # moe_mlp takes no stacks of quantized weights
            quantized_experts.check_quantized(config, mesh, quantized, arrays.w_down)
        quantized = quantized[0], quantized[1]  # checkpoints return lists
        if config.is_gated and outer.tensor:
            quantized = quantized_experts.split(quantized)
            compute = functools.partial(_joined, compute)
        arrays = arrays._replace(quantized=quantized)
        specs = specs._replace(quantized=quantized_experts.specs(outer, quantized))
    in_specs = (specs, tokens, tokens)
    sharded_layer = jax.shard_map(
        compute,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=(tokens, P(), by_rank),
        axis_names=axis_names,
        # JAX tracks no axis over which vmap splits its elements through all of its own rules.
        check_vma=not compat.vmapped_axes() - compat.vmapped_explicit_axes(),
    )
    operands = jax.tree.map(
        lambda spec, subtree: jax.tree.map(functools.partial(to_spec, spec), subtree),
        in_specs,
        (arrays, x, token_mask),
        is_leaf=lambda node: isinstance(node, P),
    )
    y, stats, sums = sharded_layer(*operands)
    if is_padded:
        y = to_spec(P(), y)[: math.prod(given.shape[:-1])].reshape(*given.shape[:-1], y.shape[-1])
    return to_spec(jax.typeof(given).sharding.spec, y), stats, sums


def _joined(layer: Any, arrays: LayerArrays, *tokens: Any) -> Outputs:
    """Runs `layer` with a rank's gate and up in one array."""
    assert arrays.quantized is not None
    joined = quantized_experts.join(arrays.quantized)
    result: Outputs = layer(arrays._replace(quantized=joined), *tokens)
    return result


_compiled = jax.jit(_run, static_argnums=(0, 1), inline=True)


def _local_layer(
    config: Config,
    router: Traced | None,
    axes: Axes,
    arrays: LayerArrays,
    x: jax.Array,
    token_mask: jax.Array | None,
) -> Outputs:
    """The layer on one rank: x is this rank's tokens, the weights this rank's shards."""
    if not x.size:  # on all ranks alike
        zero, load = jnp.zeros(()), jnp.zeros(config.num_experts, jnp.int32)
        stats = MoEStats(aux_loss=zero, z_loss=zero, expert_load=load, num_dropped=load[0])
        return x.astype(config.dtype or x.dtype), stats, arrays.sums
    tokens, mask, logits = _tokens_and_logits(config, arrays, x, token_mask)
    if router is None:
        assert config.router is not None
        route = layer_router.NAMED_ROUTERS[config.router]
        routed = layer_router.call(route, logits, config.top_k, arrays.selection_bias)
    else:
        arguments = _router_arguments(axes, arrays, x, logits)
        routed = router(arrays.router.closed_over, *arguments)
    if mask is not None:
        routed = routers.masked(routed, mask)

    y, num_dropped, sums = _experts(config, axes, arrays, tokens, routed, config.dtype or x.dtype)
    if mask is not None and arrays.shared_w_up is not None:
        y = jnp.where(mask[:, None], y, 0)
    stats = MoEStats(
        aux_loss=losses.balancing_loss(
            routed.probabilities, routed.topk_ids, token_axes=axes.tokens
        ),
        z_loss=losses.z_loss(logits, token_mask=mask, token_axes=axes.tokens),
        expert_load=losses.load(routed.topk_ids, config.num_experts, token_axes=axes.tokens),
        num_dropped=num_dropped,
    )
    y = y[: math.prod(x.shape[:-1])].reshape(*x.shape[:-1], y.shape[-1])
    return y, stats, sums


def _router_arguments(
    axes: Axes, arrays: LayerArrays, x: jax.Array, logits: jax.Array
) -> tuple[Any, ...]:
    indices = token_indices(axes, x, logits.shape[0])
    return logits, arrays.selection_bias, arrays.router.own, indices


def _tokens_and_logits(
    config: Config, arrays: LayerArrays, x: jax.Array, token_mask: jax.Array | None
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Tokens [T, H], padded for chunks, with their mask, and the router's logits float32[T, E]."""
    tokens, mask = pad(*flatten(x, token_mask), config.num_chunks)
    if mask is not None:
        # NaN in padding reaches no gradient.
        filler: Any = 0 if arrays.shared_w_up is None or not x.size else some_token(tokens, mask)
        tokens = jnp.where(mask[:, None], tokens, filler)
    logits = jnp.dot(
        tokens.astype(jnp.float32),
        arrays.router_kernel.astype(jnp.float32),
        precision=lax.Precision.HIGHEST,  # TF32 would select other experts
    )
    if arrays.logits_bias is not None:
        logits = logits + arrays.logits_bias.astype(jnp.float32)[None]
    if mask is not None:
        logits = jnp.where(mask[:, None], logits, 0)  # with a bias
    return tokens, mask, logits


def _experts(
    config: Config,
    axes: Axes,
    arrays: LayerArrays,
    tokens: jax.Array,
    routed: routers.Routing,
    dtype: Any,
) -> tuple[jax.Array, jax.Array, Accumulators | None]:
    """The experts' summed outputs [T, H], the assignments dropped on all ranks, and the sums."""
    ids, exchange = routed.topk_ids, axes.expert
    num_padded_experts = local_padded(
        arrays.w_down, arrays.quantized, is_stack=arrays.layer is not None
    )
    capacity_factor, recv_capacity = config.capacity_factor, None
    if exchange:
        num_padded_experts *= lax.axis_size(exchange)
        if num_padded_experts > config.num_experts:
            ids = jnp.where(ids < config.num_experts, ids, num_padded_experts)  # a bad id stays one
        if num_padded_experts > config.num_experts and capacity_factor is not None:
            # The even share is that of a rank without padding.
            capacity_factor *= num_padded_experts / config.num_experts
    else:
        # Every rank has copies of all experts. As experts of their own they are addressed here.
        exchange = axes.tokens
        first_id = lax.axis_index(exchange) * num_padded_experts
        ids = jnp.where((ids >= 0) & (ids < config.num_experts), first_id + ids, -1)
        num_padded_experts *= lax.axis_size(exchange)
        capacity_factor, recv_capacity = None, max(1, ids.size)
    b_down = arrays.b_down

    def whole(matrix: Any, hidden_axis: int) -> Any:
        """Gathers a matrix over the FSDP axis. float32 stays so: its gradient then is float32."""
        if matrix is None:
            return None
        if axes.fsdp:
            matrix = lax.all_gather(matrix, axes.fsdp, axis=hidden_axis, tiled=True)
        return matrix if matrix.dtype == jnp.float32 else matrix.astype(dtype)

    shared_expert = None
    if arrays.shared_w_up is not None:
        shared_expert = whole(arrays.shared_w_up, 0), whole(arrays.shared_w_down, 1)
    if axes.tensor and b_down is not None:  # the sum over the axis has it once
        b_down = jnp.where(lax.axis_index(axes.tensor) == 0, b_down, 0)
    y, stats, *sums = moe_mlp(
        tokens.astype(dtype),
        ids,
        routed.topk_weights,
        whole(arrays.w_up, 1),
        whole(arrays.w_down, 2),
        axis_name=exchange,
        num_experts=num_padded_experts,
        activation=config.activation,
        b_up=arrays.b_up,
        b_down=b_down,
        layer=arrays.layer,
        accumulators=arrays.sums,
        shared_expert=shared_expert,
        experts_fn=config.experts_fn,
        local_only=config.local_only,
        capacity_factor=capacity_factor,
        recv_capacity=recv_capacity,
        num_chunks=config.num_chunks,
        remat=config.remat,
        quantization=config.quantization,
        quantized_weights=quantized_experts.gather(axes, arrays.quantized),
        num_comm_sms=config.num_comm_sms,
        implementation=config.implementation,
    )
    local = axes.expert if config.local_only else ()
    if local:
        y = lax.psum(y, local)
    num_dropped = lax.psum(stats.num_dropped[0], (*axes.tokens, *local))
    if axes.tensor:
        y = lax.psum(y, axes.tensor)
        num_dropped = lax.pmax(num_dropped, axes.tensor)  # equal on all of them
    return y, num_dropped, sums[0] if sums else None
