"""A layer's call: routing and experts inside a `shard_map` over the layer's mesh."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
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
from jax_ep._src.layer.domains import with_domains
from jax_ep._src.layer.functions import (
    CallSite,
    Functions,
    calling,
    function_names,
    held_arrays,
    recording,
    replaying,
    trace_at,
    without_functions,
)
from jax_ep._src.layer.local import (
    LayerArrays,
    MoEStats,
    Outputs,
    RouterArrays,
    local_layer,
    router_arguments,
    tokens_and_logits,
)
from jax_ep._src.layer.mesh import find_mesh
from jax_ep._src.layer.padded_experts import check_padding, padded_adapters
from jax_ep._src.layer.parameters import reshard, specs_of
from jax_ep._src.layer.router import LAYER, Router, SplitRouter
from jax_ep._src.layer.tokens import (
    flatten,
    pad,
    pad_ids,
    token_spec,
    warn_of_repeated_work,
)
from jax_ep._src.mlp.quantized_experts import check_given
from jax_ep._src.moe.users_experts import check_adapters


@dataclasses.dataclass(frozen=True)
class _Layer:
    """A layer, by all that its program depends on beside arrays and mesh. Hashed by value."""

    config: Config
    router: Traced | None  # None for one that has a name
    functions: Functions = ()
    sites: dict[CallSite, None] | None = dataclasses.field(default=None, compare=False)

    def __call__(
        self, axes: Axes, arrays: LayerArrays, x: jax.Array, token_mask: jax.Array | None
    ) -> Outputs:
        config, held = self.config, arrays.held
        if self.sites is not None:
            config = recording(config, held, self.sites)
        elif self.functions:
            config = replaying(config, held, self.functions, arrays.functions)
        else:
            config = calling(config, held)
        return local_layer(config, self.router, axes, arrays, x, token_mask)


def apply(
    config: Config,
    router: Router | None,
    arrays: LayerArrays,
    x: jax.Array,
    token_mask: jax.Array | None,
) -> Outputs:
    """Runs the layer. `router` is None for one that has a name, and `arrays` have none of it."""
    check_input(config, x, token_mask, arrays.topk_ids)
    if arrays.topk_ids is not None:
        layer_router.check_replay(router)
    # A stack of layers, say: one of them is called by stack(), or in a scan.
    router_shape = config.hidden_size, config.num_logits
    checks.shape(LAYER, "router_kernel", arrays.router_kernel, router_shape)
    check_given(LAYER, arrays.w_up, arrays.quantized)
    mesh = find_mesh(config, [*jax.tree.leaves(arrays), x])
    check_mesh(config, mesh)
    config = with_domains(config, mesh)
    check_padding(config, mesh, arrays.w_down, axis=0 if arrays.layer is None else 1)
    if arrays.adapters is not None:
        check_adapters(LAYER, arrays.adapters, config.experts_fn)
        whole = functools.partial(reshard, mesh, P())
        adapters = padded_adapters(config, arrays.adapters, len(arrays.w_down), whole)
        arrays = arrays._replace(adapters=adapters)
    warn_of_repeated_work(config, mesh, x)
    # Functions may close over state, so that each call traces them: nothing keeps a first trace.
    traced = None
    if router is not None:
        traced, arrays = _trace_router(config, mesh, router, arrays, x, token_mask)
    layer = _Layer(config, traced)
    if function_names(config):
        arrays = arrays._replace(held=held_arrays(config))
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
        def call(logits: jax.Array, bias: Any, own: list[Any], indices: jax.Array, ids: Any) -> Any:
            return layer_router.call_split(split, own, logits, config.top_k, bias, indices, ids)

        *_, logits = tokens_and_logits(config, arrays, x, token_mask)
        found.append(trace(call, *router_arguments(axes, arrays, x, logits)))

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
        recorder = dataclasses.replace(layer, sites=calls)
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
        nothing: Any = None
        return x, MoEStats(nothing, nothing, nothing, nothing), None


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
        if (ids := arrays.topk_ids) is not None:
            ids = to_spec(P(), ids).reshape(-1, ids.shape[-1])
            arrays = arrays._replace(topk_ids=pad_ids(ids, x.shape[0]))
    param_specs = specs_of(config, outer, is_stack=arrays.layer is not None)
    by_rank = P(spec_entry(outer.all))
    specs = LayerArrays(
        **param_specs,
        selection_bias=P(),
        router=P(),
        functions=P(),
        held=P(),
        layer=P(),
        sums=by_rank,
        topk_ids=tokens,
        adapters=P(spec_entry(outer.expert)),
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
    of_stats: Any = {field.name: P() for field in dataclasses.fields(MoEStats)}
    of_stats = MoEStats(**of_stats | {"topk_ids": tokens})
    sharded_layer = jax.shard_map(
        compute,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=(tokens, of_stats, by_rank),
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

    def as_given(rows: jax.Array, spec: P) -> jax.Array:
        """Gives rows of tokens, or of tokens and padding, the shape of x and a sharding."""
        if is_padded:
            count = math.prod(given.shape[:-1])
            rows = to_spec(P(), rows)[:count].reshape(*given.shape[:-1], rows.shape[-1])
        return to_spec(spec, rows)

    spec = jax.typeof(given).sharding.spec
    if stats.topk_ids is not None:
        ids = as_given(stats.topk_ids, P(*spec[: given.ndim - 1]))
        stats = dataclasses.replace(stats, topk_ids=ids)
    return as_given(y, spec), stats, sums


def _joined(layer: Any, arrays: LayerArrays, *tokens: Any) -> Outputs:
    """Runs `layer` with a rank's gate and up in one array."""
    assert arrays.quantized is not None
    joined = quantized_experts.join(arrays.quantized)
    result: Outputs = layer(arrays._replace(quantized=joined), *tokens)
    return result


_compiled = jax.jit(_run, static_argnums=(0, 1), inline=True)
