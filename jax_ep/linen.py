"""The layer of `jax_ep.nnx` for flax.linen: the same options, parameters and numbers.

`nnx.MoE` documents the options and the meshes. ``variables["params"]`` has the names and shapes of
its parameters, as ``nnx.to_pure_dict(nnx.state(layer, nnx.Param))`` returns them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import FrozenDict
from jax.sharding import AbstractMesh, Mesh

from jax_ep._src.core.errors import ArgumentError
from jax_ep._src.layer.apply import apply
from jax_ep._src.layer.config import Config, check_mesh, check_router
from jax_ep._src.layer.local import LayerArrays, MoEStats
from jax_ep._src.layer.logical_axes import Names, boxed, names_of
from jax_ep._src.layer.mesh import given_mesh
from jax_ep._src.layer.options import LogicalAxes, Options, options_of
from jax_ep._src.layer.padded_experts import num_padded_experts
from jax_ep._src.layer.parameters import OF_EXPERTS, Parameter, initialize, parameters
from jax_ep._src.layer.router import LAYER, Router
from jax_ep._src.layer.sharded_weights import quantize
from jax_ep._src.layer.stack import Stack, make_stack
from jax_ep._src.matmul.accumulation import Accumulators
from jax_ep._src.quant.recipe import QuantizedExperts
from jax_ep._src.serialization import register_with_flax

__all__ = ["MoE", "MoEStats"]

register_with_flax()


class MoE(Options, nn.Module):
    """Router, experts, and the exchange between them, like `jax_ep.nnx.MoE`.

    Parameters are `flax.linen.Partitioned`, and their names are the mesh axes of their dimensions.
    A name that `nn.scan` or `nn.vmap` adds (``metadata_params={nn.PARTITION_NAME: "layers"}``) is
    translated by `nn.logical_axis_rules`; without a rule its dimension is not sharded. The
    selection bias is not a param but a variable in the collection "selection_bias". A router that
    is not given by name is a function, a pytree with a ``__call__`` whose arrays are constants, or,
    on meshes of Auto axes, a linen module with parameters of its own. The keys of its ``make_rng``
    differ between ranks that have different tokens.

    With `logical_axes`, a mapping from ``"experts"``, ``"hidden"`` and ``"intermediate"`` to names
    that your `nn.logical_axis_rules` translate, params are `flax.linen.LogicallyPartitioned`.
    ``"experts"`` is the dimension E of the experts' parameters; ``"hidden"`` and ``"intermediate"``
    are H and F, also of a shared expert, and shard nothing if you leave them out. Router and gate
    are whole. Parameters made under rules that lose a mesh axis of the layer are an error.

    For example::

        layer = jax_ep.linen.MoE(64, 128, num_experts=16, top_k=2)
        variables = layer.init(jax.random.key(0), jnp.ones((4, 10, 64)))
        y, stats = layer.apply(variables, jnp.ones((4, 10, 64)))
    """

    router: str | Router = dataclasses.field(default="softmax", kw_only=True)
    logical_axes: LogicalAxes | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Freezes the names, as a module has to be hashable to be a static argument."""
        if isinstance(self.logical_axes, dict):
            object.__setattr__(self, "logical_axes", FrozenDict(self.logical_axes))
        super().__post_init__()

    @nn.compact
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
          x: [..., H], as in `jax_ep.nnx.MoE`.
          token_mask: bool[...] or integers, False for padding, which is not routed; or None.
          topk_ids: int32[..., K] of an earlier call, to route by, or None, as in `jax_ep.nnx.MoE`.
          quantized_weights: what `quantize_weights` returned, or the weights of a checkpoint, or
            None, as in `jax_ep.nnx.MoE`.
          adapters: a pytree of arrays [num_experts, ...] for `experts_fn`, or None, as in
            `jax_ep.nnx.MoE`.

        Returns:
          y, of x's shape, in `dtype`, and `MoEStats`.

        Raises:
          ArgumentError (a ValueError): an option, a shape or a mesh that does not fit.
        """
        config = self._config()
        mesh = given_mesh(self.mesh)
        if mesh is not None:
            check_mesh(config, mesh)
        axes = config.axes if mesh is None else config.axes_on(mesh)
        params = parameters(config, axes, num_padded_experts(config, mesh))
        names = {} if self.logical_axes is None else names_of(config, self.logical_axes)
        arrays = {n: self._param(n, param, mesh, names.get(n)) for n, param in params.items()}
        if self.selection_bias:
            name = "selection_bias"
            bias = self.variable(name, name, jnp.zeros, config.num_logits)
            arrays["selection_bias"] = bias.value
        given = LayerArrays(
            **arrays, topk_ids=topk_ids, quantized=quantized_weights, adapters=adapters
        )
        y, stats, _ = apply(config, _drawing(self._router()), given, x, token_mask)
        return y, stats

    def quantize_weights(self, variables: Mapping[str, Any]) -> QuantizedExperts:
        """Quantizes params w_up and w_down by the layer's recipe, as `jax_ep.nnx.MoE` does.

        Call it on the module itself, outside of `apply`, once per optimizer step.

        Args:
          variables: the layer's collections.

        Returns:
          The matrices in both layouts, as `jax_ep.quant.quantize_experts` returns them.

        Raises:
          ArgumentError (a ValueError): as for `jax_ep.nnx.MoE.quantize_weights`.
        """
        params = _unboxed(variables)["params"]
        return quantize(self._config(), params.get("w_up"), params.get("w_down"))

    def stack(self, variables: Mapping[str, Any], x: jax.Array) -> tuple[Stack, Accumulators]:
        """Prepares stacked layers for a loop that reads their matrices in place.

        Call it on the module itself, outside of `apply`; see `jax_ep.nnx.MoE.stack`.

        Args:
          variables: the layer's collections, with a leading dimension of layers in every array, as
            `nn.scan` makes them.
          x: tokens like those that the calls get.

        Returns:
          The `Stack` that runs the layers, and float32 sums of the gradients of w_up and w_down.

        Raises:
          ArgumentError (a ValueError): as for `jax_ep.nnx.MoE.stack`, or a router with variables.
        """
        variables = _unboxed(variables)
        arrays = dict(variables["params"]) | dict(variables.get("selection_bias", {}))
        router = self._router()
        if isinstance(router, nn.Module):
            raise ArgumentError(
                f"jax_ep.{LAYER}: stack() of a layer whose router {type(router).__name__} has "
                "variables; expected a name or a function. Scan over the module itself."
            )
        # All layers have the same: its arrays are no stacks.
        of_all = None if router is None else functools.partial(router)
        return make_stack(self._config(), of_all, LayerArrays(**arrays), x)

    def _config(self) -> Config:
        check_router(self.router)
        name = self.router if isinstance(self.router, str) else None
        return Config(**options_of(self), router=name)

    def _router(self) -> Router | None:
        return None if isinstance(self.router, str) else self.router

    def _param(
        self,
        name: str,
        param: Parameter,
        mesh: Mesh | AbstractMesh | None,
        logical_names: Names | None,
    ) -> jax.Array:
        manual = () if mesh is None else mesh.abstract_mesh.manual_axes
        if mesh is not None and manual:
            param = param._replace(shape=_local_shape(param, mesh, manual))
        if name in OF_EXPERTS and self.has_variable("params", name):
            # They may be padded for another mesh.
            (given,) = jax.tree.leaves(self.get_variable("params", name))
            param = param._replace(shape=(*given.shape[:1], *param.shape[1:]))

        def make(key: jax.Array) -> jax.Array:
            return initialize(key, param, self.param_dtype, mesh)

        known = self._config().axes.all if mesh is None else mesh.axis_names

        def make_boxed(key: jax.Array) -> nn.Partitioned[Any]:
            return boxed(name, param, make(key), mesh, tuple(known), logical_names)

        made = self.param(name, make_boxed, unbox=False)
        return made.unbox(apply_constraint=False) if isinstance(made, nn.Partitioned) else made


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Drawing:
    """A router that draws random numbers inside of `shard_map`, from keys that are arguments."""

    keys: dict[str, jax.Array]
    router: Any = dataclasses.field(metadata={"static": True})

    def __call__(self, *args: Any, **options: Any) -> Any:
        scope = self.router.scope
        given = scope.rngs
        scope.rngs = {name: rng.replace(rng=self.keys[name]) for name, rng in given.items()}
        try:
            return self.router(*args, **options)
        finally:
            scope.rngs = given


def _drawing(router: Router | None) -> Router | None:
    """A router that may call `make_rng`: a module, bound to the layer's scope."""
    scope = getattr(router, "scope", None) if isinstance(router, nn.Module) else None
    if scope is None or not scope.rngs:
        return router
    return _Drawing({name: rng.rng for name, rng in scope.rngs.items()}, router)


def _unboxed(variables: Mapping[str, Any]) -> Any:
    """The collections, without boxes, and with parameters among them."""
    names = list(variables) if isinstance(variables, Mapping) else type(variables).__name__
    if "params" not in names:
        raise ArgumentError(
            f"jax_ep.{LAYER}: variables are {names}; expected collections, 'params' among them. "
            "Give what init returned, or {'params': params}."
        )
    return nn.unbox(variables)


def _local_shape(
    param: Parameter, mesh: Mesh | AbstractMesh, manual: tuple[str, ...]
) -> tuple[int, ...]:
    """The shape of this rank's view inside a `shard_map` over the axes `manual`."""

    def shards(entry: Any) -> int:
        names = entry if isinstance(entry, tuple) else (entry,)
        return math.prod(mesh.shape[name] for name in names if name in manual)

    entries = (*param.spec, *(None,) * (len(param.shape) - len(param.spec)))
    return tuple(size // shards(entry) for size, entry in zip(param.shape, entries, strict=True))
