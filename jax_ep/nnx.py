"""A mixture-of-experts layer for flax.nnx, called at the level of `jit`.

The layer opens its own `jax.shard_map`, so that the model around it needs to know of nothing but
the mesh. Parameters carry their partition specs as nnx metadata (``out_sharding``).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jax_ep._src.core.expert_axis import AxisName
from jax_ep._src.layer.apply import apply
from jax_ep._src.layer.config import (
    BIAS_INIT,
    KERNEL_INIT,
    Config,
    check_mesh,
    check_router,
)
from jax_ep._src.layer.local import LayerArrays, MoEStats
from jax_ep._src.layer.mesh import given_mesh
from jax_ep._src.layer.padded_experts import num_padded_experts
from jax_ep._src.layer.parameters import initialize, parameters
from jax_ep._src.layer.router import Router, check_unchanged
from jax_ep._src.layer.sharded_weights import quantize
from jax_ep._src.layer.stack import Stack, make_stack
from jax_ep._src.matmul.accumulation import Accumulators
from jax_ep._src.matmul.activations import Activation
from jax_ep._src.moe.params import Remat
from jax_ep._src.moe.users_experts import ExpertsFunction
from jax_ep._src.quant.recipe import QuantizedExperts, Recipe
from jax_ep._src.serialization import register_with_flax

__all__ = ["MoE", "MoEStats", "SelectionBias"]

register_with_flax()


class SelectionBias(nnx.Variable[Any]):
    """The type of `MoE.selection_bias`: state that is not trained by gradients."""


class MoE(nnx.Module):
    """Router, experts, and the exchange between them.

    The layer runs on the mesh of the first of these that knows one, each time it is called: the
    context (`jax.set_mesh`, or a `jax.shard_map`), ``mesh=``, a ``with mesh:`` block, the shardings
    of the parameters and of x. Without a mesh it runs on one device; where several exist and
    nothing tells which ones hold the experts, it raises an error.

    * A mesh of Auto or Explicit axes: experts are sharded over the expert axis, tokens over
      `batch_axes`, by default over all axes of the mesh.
    * Inside a `shard_map` in which the expert axis is manual: parameters and x are the local views
      there, by the specs in the parameters' metadata. Nothing is resharded over manual axes.
    * ``expert_axis=None``: every rank holds all experts, and nothing is exchanged or dropped.

    Losses, loads and their gradients are those of all tokens, and parameters are initialized
    equally, whatever the mesh.

    Every rank holds equally many experts. If E does not divide over the expert axis of the mesh
    that is known at construction, the experts' parameters (w_up, w_down, b_up, b_down) have more
    rows than E, the next multiple of its size: zeros at the end, to which no token is routed, and
    whose gradients are zeros. All else is of E experts.

    Attributes:
      router_kernel: param [hidden_size, num_experts].
      w_up: param [num_experts, hidden_size, 2, intermediate_size] (gate, up) for a gated
        activation, [num_experts, hidden_size, intermediate_size] for a plain one; None with
        `quantized_only`.
      w_down: param [num_experts, intermediate_size, hidden_size]; None with `quantized_only`.
      b_up: param [num_experts, 2, intermediate_size] (gate, up), [num_experts, intermediate_size]
        for a plain activation, or None.
      b_down: param [num_experts, hidden_size], or None.
      shared_w_up: param [hidden_size, 2, shared_intermediate_size], without 2 for a plain
        activation, or None.
      shared_w_down: param [shared_intermediate_size, hidden_size], or None.
      logits_bias: param [num_experts], or None.
      selection_bias: `SelectionBias` float32[num_experts], or None.
      router: the router, if it was not given by name.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        mesh: Mesh | AbstractMesh | None = None,
        expert_axis: AxisName | None = "expert",
        batch_axes: tuple[str, ...] | None = None,
        sequence_axes: tuple[str, ...] = (),
        fsdp_axis: str | None = None,
        tensor_axis: str | None = None,
        router: str | Router = "softmax",
        logits_bias: bool = False,
        selection_bias: bool = False,
        activation: Activation = "swiglu",
        use_bias: bool = False,
        shared_intermediate_size: int | None = None,
        experts_fn: ExpertsFunction | None = None,
        local_only: bool = False,
        capacity_factor: float | None = None,
        num_chunks: int = 1,
        remat: Remat = "dispatch",
        quantization: Recipe | None = None,
        quantized_only: bool = False,
        num_comm_sms: int | None = None,
        implementation: str | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Initializer = KERNEL_INIT,
        bias_init: Initializer = BIAS_INIT,
        rngs: nnx.Rngs,
    ):
        """Initializes the parameters, sharded over the mesh if one is known.

        Args:
          hidden_size: H, the size of a token.
          intermediate_size: F, the inner size of an expert.
          num_experts: E. Where the expert axis has more ranks than divide it, the experts'
            parameters are padded; see `MoE`.
          top_k: K, the experts per token.
          mesh: the mesh to run on; None takes it from the context or the shardings, see `MoE`.
          expert_axis: the mesh axis, or axes, that the experts are sharded over. None keeps all
            experts on every rank.
          batch_axes: the mesh axes that the leading dimension of x is sharded over. The expert axis
            and `fsdp_axis` count among them, unless they are among `sequence_axes`. None takes
            every axis of the mesh that no other option names, except one that `jax.vmap` maps over
            (``spmd_axis_name``) and, inside of a `shard_map`, manual ones other than ``"data"``.
            Ranks along an axis that a tuple leaves out repeat each other's work; there is a warning
            if x is known to be sharded over it.
          sequence_axes: the mesh axes that the second dimension of x is sharded over, if it has one
            before H.
          fsdp_axis: the mesh axis that the weights' H is sharded over too. They are gathered for
            use, and their gradients reduce-scattered.
          tensor_axis: the mesh axis that F is sharded over. Tokens are replicated over it, and the
            experts' outputs summed.
          router: ``"softmax"``, ``"sigmoid"`` (`jax_ep.routing`), or a function from float32 logits
            [T, E] and K to `routing.Routing`. Each call of the layer calls it once, to trace it for
            the tokens of a rank; eager calls compile again only if it computes something else. A
            pytree or an nnx module with a ``__call__``, or a `functools.partial`, may hold arrays;
            it may not change them during the call. Keys among them, and `nnx.Rngs`, differ between
            ranks that have different tokens; each call advances a stream by one. Keys that a
            function closes over are the same on all ranks. With an argument ``token_indices`` a
            router gets int32[T], the tokens' indices among those of all ranks, and its keys as they
            are: ``jax.vmap(jax.random.fold_in, (None, 0))(key, token_indices)`` then draws the same
            numbers on any mesh.
          logits_bias: adds a param to the logits (gpt-oss).
          selection_bias: adds a variable to the scores for the selection only (DeepSeek-V3); the
            router gets it as ``bias=``. Update it between steps by `routing.updated_bias`.
          activation: as in `moe_mlp`; a function of one array is taken for a plain one, a function
            of (gate, up) for a gated one.
          use_bias: adds biases to both matmuls of each expert (gpt-oss).
          shared_intermediate_size: the F of a shared expert, which every token takes (DeepSeek-V3);
            several of them are one of their summed size.
          experts_fn: computes the experts, as in `moe_mlp`.
          local_only: tokens are not sharded over the expert axis. Each rank computes its own
            experts on all of them, and the layer sums over the axis: for few tokens.
          capacity_factor: a rank can receive this multiple of its even share, as in `dispatch`.
            None drops nothing, if a token's experts are distinct.
          num_chunks: as in `moe_mlp`; tokens are padded to a multiple of it.
          remat: as in `moe_mlp`.
          quantization: as in `moe_mlp`.
          quantized_only: the layer has no w_up and w_down, and each call takes quantized_weights:
            for inference from a checkpoint in eight bits.
          num_comm_sms: the most SMs that each transfer uses on CUDA; None chooses.
          implementation: ``"cuda"``, ``"xla"``, or None to choose by platform, dtype and shapes.
          dtype: the dtype that experts compute in and return; None for x's. Routing is float32.
          param_dtype: the dtype of the parameters. float32 weights stay so with a narrower dtype:
            their gradients then are float32 as well.
          kernel_init: initializes each matrix [in, out] by itself: the router's, and those of each
            expert, gate and up apart.
          bias_init: initializes the biases.
          rngs: gives the keys of the parameters.

        Raises:
          ArgumentError (a ValueError): sizes, a router or an activation that do not fit, or a mesh
            that lacks the expert axis or does not divide the sizes.
        """
        check_router(router)
        self.config = config = Config(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_experts=num_experts,
            top_k=top_k,
            mesh=mesh,
            expert_axis=expert_axis,
            batch_axes=batch_axes,
            sequence_axes=sequence_axes,
            fsdp_axis=fsdp_axis,
            tensor_axis=tensor_axis,
            router=router if isinstance(router, str) else None,
            logits_bias=logits_bias,
            selection_bias=selection_bias,
            activation=activation,
            use_bias=use_bias,
            shared_intermediate_size=shared_intermediate_size,
            experts_fn=experts_fn,
            local_only=local_only,
            capacity_factor=capacity_factor,
            num_chunks=num_chunks,
            remat=remat,
            quantization=quantization,
            quantized_only=quantized_only,
            num_comm_sms=num_comm_sms,
            implementation=implementation,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
        )
        known_mesh = given_mesh(mesh)
        if known_mesh is not None:
            check_mesh(config, known_mesh)
        axes = config.axes if known_mesh is None else config.axes_on(known_mesh)
        made = {
            name: _param(initialize(rngs.params(), param, param_dtype, known_mesh), param.spec)
            for name, param in parameters(
                config, axes, num_padded_experts(config, known_mesh)
            ).items()
        }
        self.router_kernel = made["router_kernel"]
        self.w_up: Any = made.get("w_up")
        self.w_down: Any = made.get("w_down")
        self.b_up, self.b_down, self.logits_bias, self.shared_w_up, self.shared_w_down = map(
            made.get, ("b_up", "b_down", "logits_bias", "shared_w_up", "shared_w_down")
        )
        self.selection_bias = SelectionBias(jnp.zeros(num_experts)) if selection_bias else None
        self.router = None if isinstance(router, str) else _attribute(router)

    def __call__(
        self,
        x: jax.Array,
        *,
        token_mask: jax.Array | None = None,
        quantized_weights: QuantizedExperts | None = None,
    ) -> tuple[jax.Array, MoEStats]:
        """Routes the tokens, and sums the outputs of each one's experts by the router's weights.

        Args:
          x: [..., H] with at least one dimension before H. The first one is sharded over the batch
            axes, the second one over the sequence axes. Where sizes do not divide, all tokens are
            flattened, padded by masked ones, and sharded over both.
          token_mask: bool[...] or integers, False for tokens that are not routed (padding): their y
            is zero, and losses and loads leave them out.
          quantized_weights: those of `quantize_weights`, or of a checkpoint
            (`jax_ep.quant.experts_from_checkpoint`), or None. FSDP and
            tensor axes shard them as they do the matrices; blocks of 128 x 128 must be whole on
            each rank.

        Returns:
          y, of x's shape (but of the size that `experts_fn` returns), in `dtype`, and `MoEStats`.
          With Explicit axes y is sharded as x is.

        Raises:
          ArgumentError (a ValueError): a shape that does not fit the layer or the mesh, or no mesh
            where one is needed.
        """
        given = self._arrays()._replace(quantized=quantized_weights)
        y, stats, _ = apply(self.config, _drawing(self.router), given, x, token_mask)
        return y, stats

    def quantize_weights(self) -> QuantizedExperts:
        """Quantizes w_up and w_down by the layer's recipe, each rank those that it has.

        Call it once per optimizer step, outside of the function that is differentiated, and give
        the result to all calls of that step::

            quantized = layer.quantize_weights()
            gradients = nnx.grad(loss)(layer, x, quantized)  # layer(x, quantized_weights=quantized)

        Returns:
          The matrices in both layouts, as `jax_ep.quant.quantize_experts`.

        Raises:
          ArgumentError (a ValueError): a layer without `quantization`, no mesh where one is needed,
            or blocks of 128 x 128 that do not lie on one rank.
        """
        arrays = self._arrays()
        return quantize(self.config, arrays.w_up, arrays.w_down)

    def stack(self, x: jax.Array) -> tuple[Stack, Accumulators]:
        """Prepares a module of stacked layers for a loop that reads their matrices in place.

        The module's parameters have a leading dimension, as those of layers made by `nnx.vmap`,
        whose metadata must tell: ``nnx.vmap(..., transform_metadata={nnx.PARTITION_NAME: None})``.
        A scan over the module itself copies each layer's matrices, and their gradients::

            moe, sums = layers.moe.stack(x)

            def block(carry, layer):
                x, sums = carry
                y, stats, sums = moe(x, layer, sums)
                return (x + y, sums), stats.aux_loss

            (x, _), losses = jax.lax.scan(block, (x, sums), jnp.arange(num_layers))

        The matrices are cast to the layer's dtype once, here. Without a gradient leave the sums
        out: ``y, stats = moe(x, layer)``.

        Args:
          x: tokens like those of the calls.

        Returns:
          What calls the layers, and the float32 sums of the gradients of w_up and w_down.

        Raises:
          ArgumentError (a ValueError): parameters that are no stacks, or whose metadata lack the
            dimension of layers; `fsdp_axis`, `quantization` or `experts_fn`, which make other
            matrices of those in the stack.
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
    "shared_w_up",
    "shared_w_down",
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
