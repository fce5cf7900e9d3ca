"""A mixture-of-experts layer for flax.nnx, called at the level of `jit`.

The layer opens its own `jax.shard_map`, so the model around it needs to know nothing but the mesh.
Parameters carry their partition specs as nnx metadata (``out_sharding``).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jax_ep._src.layer.apply import apply
from jax_ep._src.layer.config import Config, check_mesh, check_router
from jax_ep._src.layer.local import LayerArrays, MoEStats
from jax_ep._src.layer.mesh import given_mesh
from jax_ep._src.layer.options import Options, options_of, takes
from jax_ep._src.layer.padded_experts import num_padded_experts
from jax_ep._src.layer.parameters import Parameter, initialize, parameters
from jax_ep._src.layer.router import Router, check_unchanged
from jax_ep._src.layer.sharded_weights import quantize
from jax_ep._src.layer.stack import Stack, make_stack
from jax_ep._src.matmul.accumulation import Accumulators
from jax_ep._src.quant.recipe import QuantizedExperts
from jax_ep._src.serialization import register_with_flax

__all__ = ["MoE", "MoEStats", "SelectionBias"]

register_with_flax()


class SelectionBias(nnx.Variable[Any]):
    """The type of `MoE.selection_bias`, state that gradients do not train."""


@dataclasses.dataclass(unsafe_hash=True)
class _Arguments(Options):
    _: dataclasses.KW_ONLY
    router: str | Router = "softmax"
    rngs: nnx.Rngs


class MoE(nnx.Module):
    """Router, experts, and the exchange between them.

    Each call runs on the mesh of the first of these that knows one: the context (`jax.set_mesh`, or
    a `jax.shard_map`), ``mesh=``, a ``with mesh:`` block, the shardings of the parameters and of x.
    Without a mesh the layer runs on one device, but raises an error if several exist and nothing
    tells which ones hold the experts.

    * On a mesh of Auto or Explicit axes, experts are sharded over the expert axis and tokens over
      `batch_axes`, by default over all axes of the mesh that have no other use.
    * Inside a `shard_map` in which the expert axis is manual, the layer takes local views of the
      parameters, by the specs in their metadata, and of x. It reshards nothing over manual axes.
    * With ``expert_axis=None`` every rank holds all experts, and nothing is exchanged or dropped.

    Whatever the mesh, losses, loads and their gradients are those of all tokens, and parameters get
    the same initial values.

    Every rank holds the same number of experts. If E does not divide over the expert axis of the
    mesh that is known at construction, the experts' parameters (w_up, w_down, b_up, b_down) get the
    next multiple of the axis size as their number of rows. The rows past E are zeros, and so are
    their gradients, because no token is routed to them. Everything else keeps the size E.

    Sizes below are those of a layer without `latent_size`, which takes the place of hidden_size in
    w_up, w_down and b_down, and without identity experts, which the router, logits_bias and
    selection_bias have beside num_experts.

    For example::

        layer = jax_ep.nnx.MoE(64, 128, num_experts=16, top_k=2, rngs=nnx.Rngs(0))
        y, stats = layer(jnp.ones((4, 10, 64)))

    Attributes:
      router_kernel: param [hidden_size, num_experts].
      w_up: param [num_experts, hidden_size, 2, intermediate_size] (gate, up) for a gated
        activation, [num_experts, hidden_size, intermediate_size] for a plain one; None with
        `quantized_only`.
      w_down: param [num_experts, intermediate_size, hidden_size]; None with `quantized_only`.
      b_up: param [num_experts, 2, intermediate_size] (gate, up), [num_experts, intermediate_size]
        for a plain activation, or None.
      b_down: param [num_experts, hidden_size], or None.
      latent_in: param [hidden_size, latent_size], or None.
      latent_out: param [latent_size, hidden_size], or None.
      shared_w_up: param [hidden_size, 2, shared_intermediate_size], without the 2 for a plain
        activation, or None.
      shared_w_down: param [shared_intermediate_size, hidden_size], or None.
      shared_gate: param [hidden_size, 1], or None.
      logits_bias: param [num_experts], or None.
      selection_bias: `SelectionBias` float32[num_experts], or None.
      router: the router, if it was not given by name.
    """

    @takes(_Arguments)
    def __init__(self, given: _Arguments):  # noqa: D417
        """Initializes the parameters, sharded over the mesh if one is known.

        Args:
          router: ``"softmax"``, ``"sigmoid"`` (`jax_ep.routing`), or a function from float32 logits
            [T, E] and K to `routing.Routing`. Each call of the layer calls it once, to trace it for
            the tokens of a rank; eager calls compile again only if it computes something else. A
            pytree or an nnx module with a ``__call__``, or a `functools.partial`, may hold arrays,
            but may not change them during the call. If keys or `nnx.Rngs` are among them, they
            differ between ranks that have different tokens, and each call advances a stream by one.
            Keys that a function closes over are the same on all ranks. A router with an argument
            ``token_indices`` gets int32[T], the tokens' indices among those of all ranks, and its
            keys unchanged, so that ``jax.vmap(jax.random.fold_in, (None, 0))(key, token_indices)``
            draws the same numbers on any mesh.
          rngs: supplies the keys that initialize the parameters.

        Raises:
          ArgumentError (a ValueError): sizes, a router or an activation that do not fit, or a mesh
            that lacks the expert axis or does not divide the sizes.
        """
        router, rngs = given.router, given.rngs
        check_router(router)
        name = router if isinstance(router, str) else None
        self.config = config = Config(**options_of(given), router=name)
        known_mesh = given_mesh(config.mesh)
        if known_mesh is not None:
            check_mesh(config, known_mesh)
        axes = config.axes if known_mesh is None else config.axes_on(known_mesh)
        params = parameters(config, axes, num_padded_experts(config, known_mesh))

        def make(param: Parameter) -> nnx.Param[jax.Array]:
            value = initialize(rngs.params(), param, config.param_dtype, known_mesh)
            return _param(value, param.spec)

        made = {name: make(param) for name, param in params.items()}
        self.router_kernel = made["router_kernel"]
        self.w_up: Any = made.get("w_up")
        self.w_down: Any = made.get("w_down")
        self.b_up, self.b_down, self.logits_bias = map(made.get, ("b_up", "b_down", "logits_bias"))
        self.latent_in, self.latent_out = map(made.get, ("latent_in", "latent_out"))
        self.shared_w_up, self.shared_w_down, self.shared_gate = map(
            made.get, ("shared_w_up", "shared_w_down", "shared_gate")
        )
        self.selection_bias = (
            SelectionBias(jnp.zeros(config.num_logits)) if config.selection_bias else None
        )
        self.router = None if isinstance(router, str) else _attribute(router)

    def __call__(
        self,
        x: jax.Array,
        *,
        token_mask: jax.Array | None = None,
        topk_ids: jax.Array | None = None,
        quantized_weights: QuantizedExperts | None = None,
        adapters: Any = None,
    ) -> tuple[jax.Array, MoEStats]:
        """Routes the tokens, and sums each token's expert outputs, weighted by the router.

        Args:
          x: [..., H] with at least one dimension before H. The first is sharded over the batch
            axes, the second over the sequence axes. Where sizes do not divide, the layer flattens
            all tokens, pads them with masked ones, and shards them over both.
          token_mask: bool[...] or integers, False for tokens that are not routed (padding): their y
            is zero, and losses and loads leave them out.
          topk_ids: int32[..., K], the experts that an earlier call selected for these tokens
            (`MoEStats.topk_ids`), or None. The router weighs them, with gradients, and selects
            none; one that has no name needs an argument ``topk_ids``.
          quantized_weights: what `quantize_weights` or, for a checkpoint,
            `jax_ep.quant.experts_from_checkpoint` returned, or None. FSDP and tensor axes shard
            them as they do the matrices, and blocks of 128 x 128 must be whole on each rank.
          adapters: a pytree of arrays [num_experts, ...] beside the weights, or None. The fifth
            argument of `experts_fn` is the part of this rank's experts, whole over FSDP and tensor
            axes. Gradients flow to it.

        Returns:
          y in `dtype`, of x's shape except that an `experts_fn` may return another last size, and
          `MoEStats`. With Explicit axes y is sharded as x is.

        Raises:
          ArgumentError (a ValueError): a shape that does not fit the layer or the mesh, or no mesh
            where one is needed.
        """
        given = self._arrays()._replace(
            topk_ids=topk_ids, quantized=quantized_weights, adapters=adapters
        )
        y, stats, _ = apply(self.config, _drawing(self.router), given, x, token_mask)
        return y, stats

    def quantize_weights(self) -> QuantizedExperts:
        """Quantizes w_up and w_down by the layer's recipe; each rank quantizes those that it has.

        Call it once per optimizer step, outside of the function that you differentiate, and give
        the result to all calls of that step::

            quantized = layer.quantize_weights()
            gradients = nnx.grad(loss)(layer, x, quantized)  # layer(x, quantized_weights=quantized)

        Returns:
          The matrices in both layouts, as `jax_ep.quant.quantize_experts` returns them.

        Raises:
          ArgumentError (a ValueError): a layer without `quantization`, no mesh where one is needed,
            or blocks of 128 x 128 that are split between ranks.
        """
        arrays = self._arrays()
        return quantize(self.config, arrays.w_up, arrays.w_down)

    def stack(self, x: jax.Array) -> tuple[Stack, Accumulators]:
        """Prepares a module of stacked layers for a loop that reads their matrices in place.

        Its parameters have a leading dimension of layers, as `nnx.vmap` makes them, and their
        metadata must say so: ``nnx.vmap(..., transform_metadata={nnx.PARTITION_NAME: None})``. Scan
        over the index of the layer, because a scan over the module itself copies each layer's
        matrices and their gradients::

            moe, sums = layers.moe.stack(x)

            def block(carry, layer):
                x, sums = carry
                y, stats, sums = moe(x, layer, sums)
                return (x + y, sums), stats.aux_loss

            (x, _), losses = jax.lax.scan(block, (x, sums), jnp.arange(num_layers))

        The matrices are cast to the layer's dtype once, here. If you take no gradient, leave the
        sums out: ``y, stats = moe(x, layer)``.

        Args:
          x: tokens like those that the calls get.

        Returns:
          The `Stack` that runs the layers, and float32 sums of the gradients of w_up and w_down.

        Raises:
          ArgumentError (a ValueError): parameters that are not stacks, or whose metadata lack the
            dimension of layers; or `fsdp_axis`, `quantization` or `experts_fn`, with which layers
            use other matrices than those in the stack.
        """
        variables = {name: getattr(self, name) for name in PARAMETERS}
        shardings = {
            name: variable.get_metadata().get("out_sharding")
            for name, variable in variables.items()
            if variable is not None
        }
        return make_stack(self.config, _drawing(self.router), self._arrays(), x, shardings)

    def _arrays(self) -> LayerArrays:
        variables = {name: getattr(self, name) for name in (*PARAMETERS, "selection_bias")}
        return LayerArrays(**{name: v if v is None else v[...] for name, v in variables.items()})


PARAMETERS = (
    "router_kernel",
    "w_up",
    "w_down",
    "b_up",
    "b_down",
    "latent_in",
    "latent_out",
    "shared_w_up",
    "shared_w_down",
    "shared_gate",
    "logits_bias",
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Drawing:
    """A router that draws random numbers inside of `shard_map`, from streams of this call."""

    router: nnx.Module

    def __call__(self, *args: Any, **options: Any) -> Any:
        router: Any = nnx.clone(self.router)  # whose counts may change here
        before = _leaves_beside_streams(router)
        routed = router(*args, **options)
        check_unchanged(router, before, _leaves_beside_streams(router))
        return routed


def _leaves_beside_streams(router: nnx.Module) -> list[Any]:
    return jax.tree.leaves(nnx.state(router, nnx.Not(nnx.RngState)))


def _drawing(router: Any) -> Any:
    """A router that may draw from its `nnx.Rngs`, of which each stream has advanced by one."""
    streams = _streams(router)
    if not streams:
        return router
    copied = nnx.clone(router)
    for stream, its_copy in zip(streams, _streams(copied), strict=True):
        key, count = stream.key[...], stream.count[...]
        fold_in = jax.random.fold_in
        for _ in range(key.ndim):  # a stack of layers
            fold_in = jax.vmap(fold_in)
        its_copy.key[...], its_copy.count[...] = fold_in(key, count), jnp.zeros_like(count)
        stream.count[...] = count + 1
    return _Drawing(copied)


def _streams(router: Any) -> list[nnx.RngStream]:
    if not isinstance(router, nnx.Module):
        return []
    return [node for _, node in nnx.iter_graph(router) if isinstance(node, nnx.RngStream)]


def _attribute(router: Router) -> Any:
    """A pytree or a module is data. A function is static: transformations take no such leaf."""
    is_leaf = all(leaf is router for leaf in jax.tree.leaves(router))
    return router if is_leaf and not isinstance(router, nnx.Module) else nnx.data(router)


def _param(value: jax.Array, spec: P) -> nnx.Param[jax.Array]:
    # It is sharded already: Flax would shard it over meshes of one kind of axes only.
    return nnx.Param(value, out_sharding=tuple(spec), eager_sharding=False)
