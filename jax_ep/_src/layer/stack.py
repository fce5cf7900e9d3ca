"""The layers of a stacked module: a loop over them reads their matrices in place."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jax_ep._src.core import compat
from jax_ep._src.core.errors import ArgumentError
from jax_ep._src.layer.apply import apply
from jax_ep._src.layer.config import Config, check_mesh, spec_entry
from jax_ep._src.layer.local import LayerArrays, MoEStats
from jax_ep._src.layer.mesh import find_mesh
from jax_ep._src.layer.padded_experts import check_padding
from jax_ep._src.layer.parameters import OF_EXPERTS, reshard, specs_of
from jax_ep._src.layer.router import LAYER, Router
from jax_ep._src.matmul.accumulation import Accumulators, accumulators
from jax_ep._src.matmul.layer_stack import LayerIndex, check_index

MATRICES = ("w_up", "w_down")


class Stack:
    """Runs one layer of a stacked `MoE`. `MoE.stack` makes it; a scan's body closes over it."""

    def __init__(self, config: Config, router: Router | None, arrays: LayerArrays, dtype: Any):
        self._config, self._router = config, router
        self._num_layers = _num_layers(arrays)
        matrices = {name: getattr(arrays, name).astype(dtype) for name in MATRICES}
        self._arrays = arrays._replace(**matrices)

    @overload
    def __call__(
        self,
        x: jax.Array,
        layer: LayerIndex,
        sums: None = None,
        *,
        token_mask: jax.Array | None = None,
        topk_ids: jax.Array | None = None,
    ) -> tuple[jax.Array, MoEStats]: ...

    @overload
    def __call__(
        self,
        x: jax.Array,
        layer: LayerIndex,
        sums: Accumulators,
        *,
        token_mask: jax.Array | None = None,
        topk_ids: jax.Array | None = None,
    ) -> tuple[jax.Array, MoEStats, Accumulators]: ...

    def __call__(
        self,
        x: jax.Array,
        layer: LayerIndex,
        sums: Accumulators | None = None,
        *,
        token_mask: jax.Array | None = None,
        topk_ids: jax.Array | None = None,
    ) -> tuple[jax.Array, MoEStats] | tuple[jax.Array, MoEStats, Accumulators]:
        """Does what `MoE` does, with the parameters of one layer.

        Args:
          x: [..., H].
          layer: an int, or an integer scalar on the device such as the index of the scan.
          sums: what `MoE.stack` or the call before returned, as the carry of the scan. The
            gradients of w_up and w_down are added to them in place.
          token_mask: bool[...] or integers, False for padding, or None.
          topk_ids: int32[..., K] of an earlier call of this layer, to route by, or None.

        Returns:
          y and `MoEStats`; with sums also those for the next call, as a third result.

        Raises:
          ArgumentError (a ValueError): as for `MoE`, or an int that no layer has as its index.
        """
        index = check_index(LAYER, layer, self._num_layers)

        def select(array: Any) -> Any:
            is_array = hasattr(array, "shape")
            return lax.dynamic_index_in_dim(array, index, keepdims=False) if is_array else array

        arrays = self._arrays
        others = (name for name in LayerArrays._fields if name not in OF_EXPERTS)
        arrays = arrays._replace(**{n: jax.tree.map(select, getattr(arrays, n)) for n in others})
        arrays = arrays._replace(layer=index, sums=sums, topk_ids=topk_ids)
        router = jax.tree.map(select, self._router)
        y, stats, sums = apply(self._config, router, arrays, x, token_mask)
        return (y, stats) if sums is None else (y, stats, sums)


def make_stack(
    config: Config,
    router: Router | None,
    arrays: LayerArrays,
    x: jax.Array,
    shardings: Mapping[str, Any] | None = None,
) -> tuple[Stack, Accumulators]:
    """Returns the stack for tokens like x, and the sums that start a chain of its calls.

    `shardings` are what the module says of its parameters: an entry per dimension, by name.
    """
    mesh = find_mesh(config, [*jax.tree.leaves(arrays), x])
    check_mesh(config, mesh)
    given = {
        "fsdp_axis": config.fsdp_axis,
        "quantization": config.quantization,
        "experts_fn": config.experts_fn,
    }
    for name, value in given.items():
        if value is not None:
            raise ArgumentError(
                f"jax_ep.{LAYER}: stack() of a layer with {name}, which makes other matrices of "
                "those in the stack; expected matrices that kernels read in place. Scan over the "
                "module itself, which slices."
            )
    stack = Stack(config, router, arrays, config.dtype or x.dtype)
    check_padding(config, mesh, arrays.w_down, axis=1)
    _check_shardings(mesh, arrays, shardings or {})
    return stack, _start_sums(config, mesh, arrays.w_up, arrays.w_down)


def _start_sums(
    config: Config, mesh: Mesh | AbstractMesh, w_up: jax.Array, w_down: jax.Array
) -> Accumulators:
    """Returns `accumulators` of every rank for stacks of layers, one rank after another."""
    axes = config.axes_on(mesh)
    manual = frozenset(mesh.abstract_mesh.manual_axes)

    def start(w_up: jax.Array, w_down: jax.Array, names: tuple[str, ...]) -> Accumulators:
        return compat.vary_together(accumulators(w_up, w_down), names)

    if manual.issuperset(axes.all):
        return start(w_up, w_down, axes.within(manual).all)
    axis_names = frozenset(mesh.axis_names) - manual - compat.vmapped_explicit_axes()
    outer = axes.within(axis_names)
    specs = specs_of(config, outer, is_stack=True)
    sharded = jax.shard_map(
        functools.partial(start, names=axes.all),
        mesh=mesh,
        in_specs=(specs["w_up"], specs["w_down"]),
        out_specs=P(spec_entry(outer.all)),
        axis_names=axis_names,
    )
    return sharded(reshard(mesh, specs["w_up"], w_up), reshard(mesh, specs["w_down"], w_down))


def _check_shardings(
    mesh: Mesh | AbstractMesh, arrays: LayerArrays, shardings: Mapping[str, Any]
) -> None:
    """Raises if they lack the dimension of layers, which would take the place of the next one."""
    for name, sharding in shardings.items():
        shape, spec = getattr(arrays, name).shape, tuple(sharding or ())
        entries = (entry if isinstance(entry, tuple) else (entry,) for entry in spec)
        axes = [axis for entry in entries for axis in entry if mesh.shape.get(axis, 1) > 1]
        if axes and len(spec) != len(shape):
            raise ArgumentError(
                f"jax_ep.{LAYER}: stack() of {name} of shape {shape}, whose metadata say "
                f"out_sharding={spec}; expected an entry per dimension, None for the layers: the "
                f"axis {axes[0]} would shard another dimension. Make the layers by "
                "nnx.vmap(..., transform_metadata={nnx.PARTITION_NAME: None}), or call "
                "set_metadata(out_sharding=...)."
            )


def _num_layers(arrays: LayerArrays) -> int:
    """Returns how many layers there are, and raises unless the arrays are stacks."""
    shapes = {n: a.shape for n, a in arrays._asdict().items() if hasattr(a, "shape")}
    counts = {shape[0] for shape in shapes.values()}
    if len(counts) != 1 or jnp.ndim(arrays.router_kernel) != 3:
        raise ArgumentError(
            f"jax_ep.{LAYER}: stack() of parameters of shapes {shapes}; expected stacks of equally "
            "many layers, [layers, ...]. Make them by nnx.vmap, linen's nn.scan or jnp.stack."
        )
    (count,) = counts
    return int(count)
