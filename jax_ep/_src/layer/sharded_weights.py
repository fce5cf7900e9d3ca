"""Quantized experts on a mesh: how ranks quantize and gather them, and their partition specs.

Values and scales are sharded as the float matrices are, over experts, FSDP and tensor axes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jax_ep._src.core import compat
from jax_ep._src.core.errors import ArgumentError
from jax_ep._src.layer.config import Axes, Config, check_mesh, spec_entry
from jax_ep._src.layer.mesh import find_mesh
from jax_ep._src.layer.padded_experts import check_padding, num_padded_experts
from jax_ep._src.layer.parameters import parameters, reshard
from jax_ep._src.layer.router import LAYER
from jax_ep._src.mlp.quantized_experts import quantize_experts
from jax_ep._src.quant.formats import matrix_scales
from jax_ep._src.quant.quantized import Quantized, as_bits, from_bits
from jax_ep._src.quant.recipe import (
    QuantizedExperts,
    QuantizedWeights,
    check_no_quantized_weights,
    check_pair,
    check_quantized_experts,
    constant,
)

HIDDEN, INNER = "hidden", "inner"

_DIMENSIONS = (
    ((INNER, HIDDEN), (HIDDEN, INNER)),
    ((HIDDEN, INNER), (INNER, HIDDEN)),
)
"""The last two dimensions of w_up's and w_down's layouts, forward and backward."""


def quantize(config: Config, w_up: Any, w_down: Any) -> QuantizedExperts:
    """Quantizes the layer's matrices by its recipe, each rank those that it has."""
    if config.quantization is None:
        raise ArgumentError(
            f"jax_ep.{LAYER}: quantize_weights() of a layer without a recipe; expected "
            "quantization=jax_ep.quant.Recipe(...) among its options."
        )
    if w_up is None or w_down is None:
        raise ArgumentError(
            f"jax_ep.{LAYER}: quantize_weights() of a layer without w_up and w_down; expected "
            "float matrices. Make the layer without quantized_only, or take the weights from a "
            "checkpoint by jax_ep.quant.experts_from_checkpoint."
        )
    if w_down.ndim != 3:
        raise ArgumentError(
            f"jax_ep.{LAYER}: quantize_weights() with w_down of shape {w_down.shape}; expected one "
            "layer's, of three axes. For stacked layers call it under nnx.vmap or jax.vmap."
        )
    mesh = find_mesh(config, [w_up, w_down])
    check_mesh(config, mesh)
    check_padding(config, mesh, w_down, axis=0)
    _check_whole_blocks(config, mesh)
    return _quantize(config, mesh, w_up, w_down)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _quantize(
    config: Config, mesh: Mesh | AbstractMesh, w_up: jax.Array, w_down: jax.Array
) -> QuantizedExperts:
    assert config.quantization is not None
    compute = functools.partial(
        quantize_experts, quantization=config.quantization, implementation=config.implementation
    )
    axes = config.axes_on(mesh)
    manual = frozenset(mesh.abstract_mesh.manual_axes)
    if manual.issuperset(axes.expert or axes.tokens):
        return compute(w_up, w_down)
    # XLA reduces over axes that split the values of a scale, or gate and up apart.
    is_blocked = config.quantization.weights.is_blocked
    left = () if is_blocked else axes.fsdp
    left += () if is_blocked and not config.is_gated else axes.tensor
    axis_names = frozenset(mesh.axis_names) - manual - frozenset(left)
    axis_names -= compat.vmapped_explicit_axes()
    outer = axes.within(axis_names)
    params = parameters(config, outer)
    in_specs = params["w_up"].spec, params["w_down"].spec
    on_ranks = jax.shard_map(
        compute,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=specs(outer, jax.eval_shape(compute, w_up, w_down)),
        axis_names=axis_names,
    )
    up, down = map(functools.partial(reshard, mesh), in_specs, (w_up, w_down))
    result: QuantizedExperts = on_ranks(up, down)
    return result


def check_quantized(
    config: Config, mesh: Mesh | AbstractMesh, quantized: QuantizedExperts, w_down: Any
) -> None:
    """Raises unless these are the layer's matrices, with whole blocks on each rank."""
    if config.quantization is None:
        return check_no_quantized_weights(LAYER, "quantized_weights", quantized)
    hidden, inner = config.row_size, config.intermediate_size
    columns = 2 * inner if config.is_gated else inner
    padded = num_padded_experts(config, mesh) if w_down is None else w_down.shape[0]
    shapes = (padded, hidden, columns), (padded, inner, hidden)
    check_quantized_experts(LAYER, quantized, config.quantization, *shapes)
    for which, one in zip(("up", "down"), quantized, strict=True):
        scales = tuple(layout.scales.shape for layout in one.layouts)
        expected = tuple(matrix_scales(layout.format, layout.shape) for layout in one.layouts)
        if scales != expected:
            raise ArgumentError(
                f"jax_ep.{LAYER}: quantized_weights ({which}) has scales of shapes {scales}; "
                f"expected {expected}, which are sharded as the values are. Broadcast them, or "
                "quantize the weights by the layer's recipe."
            )
    _check_whole_blocks(config, mesh)
    return None


def _check_whole_blocks(config: Config, mesh: Mesh | AbstractMesh) -> None:
    assert config.quantization is not None
    rows, block = config.quantization.weights.matrix_block
    if block is None:
        return
    axes = config.axes_on(mesh)
    for name, size, names in (
        (
            "hidden_size" if config.latent_size is None else "latent_size",
            config.row_size,
            axes.fsdp,
        ),
        ("intermediate_size", config.intermediate_size, axes.tensor),
    ):
        num_ranks = math.prod(mesh.shape[axis] for axis in names)
        if num_ranks > 1 and size % (block * num_ranks):
            raise ArgumentError(
                f"jax_ep.{LAYER}: quantized_weights have blocks of {rows} x {block}, and the "
                f"axes {names} split {name}={size} over {num_ranks} ranks; expected a multiple of "
                f"{block} on each rank. Leave them out: each call quantizes what it gathers."
            )


def specs(axes: Axes, quantized: QuantizedExperts) -> QuantizedExperts:
    """Returns the partition specs of all arrays, after `split`."""
    entries = {HIDDEN: spec_entry(axes.fsdp), INNER: spec_entry(axes.tensor)}
    expert = spec_entry(axes.expert)

    def of_layout(x: Quantized, dimensions: tuple[str, str]) -> Any:
        def spec(sharded: tuple[str | None, ...], ndim: int) -> P:
            last = [None if name is None else entries[name] for name in sharded]
            if ndim == 4:  # the inner dimension is gate and up
                last.insert(dimensions.index(INNER), None)
            return P(expert, *last)

        found: dict[str, Any] = {
            "values": spec(dimensions, x.values.ndim),
            "scales": spec(sharded_of_scales(x, dimensions), x.scales.ndim),
        }
        return dataclasses.replace(x, **found)

    return _map(of_layout, quantized)


def split(quantized: QuantizedExperts) -> QuantizedExperts:
    """Splits w_up's inner dimension into gate and up, of which each rank has a part."""
    return _of_up(quantized, lambda a, axis: a.reshape(*_split_shape(a.shape, axis)))


def join(quantized: QuantizedExperts) -> QuantizedExperts:
    """Returns what `split` was given, or a rank's part of it."""
    return _of_up(quantized, lambda a, axis: a.reshape(*a.shape[:axis], -1, *a.shape[axis + 2 :]))


def gather(axes: Axes, quantized: QuantizedExperts | None) -> QuantizedExperts | None:
    """Gathers the matrices of a rank's experts over the FSDP axis, as bytes."""
    if quantized is None or not axes.fsdp:
        return quantized
    check_pair(LAYER, quantized)

    def of_layout(x: Quantized, dimensions: tuple[str, str]) -> Quantized:
        def whole(array: jax.Array, sharded: tuple[str | None, ...]) -> jax.Array:
            if HIDDEN not in sharded:
                return array
            axis = 1 + sharded.index(HIDDEN)
            return lax.all_gather(array, axes.fsdp, axis=axis, tiled=True)

        bits = as_bits(constant(LAYER, "quantized_weights", x))
        of_scales = sharded_of_scales(x, dimensions)
        values, scales = whole(bits.values, dimensions), whole(bits.scales, of_scales)
        return from_bits(dataclasses.replace(bits, values=values, scales=scales))

    gathered = _map(of_layout, quantized)
    # Square blocks have one set of values in both layouts: transposing takes less than gathering.
    return tuple(
        QuantizedWeights(one.forward, one.forward.mT)
        if one.forward.format.has_square_blocks
        else one
        for one in gathered
    )  # type: ignore[return-value]


def sharded_of_scales(x: Quantized, dimensions: tuple[str, str]) -> tuple[str | None, ...]:
    """Returns the dimensions that scales have: both, or that of the channels, one scale each."""
    return dimensions if x.format.is_blocked else (dimensions[0], None)


def _map(
    function: Callable[[Quantized, tuple[str, str]], Any], quantized: QuantizedExperts
) -> QuantizedExperts:
    up, down = (
        QuantizedWeights(*map(function, one.layouts, dimensions))
        for one, dimensions in zip(quantized, _DIMENSIONS, strict=True)
    )
    return up, down


def _of_up(
    quantized: QuantizedExperts, reshape: Callable[[jax.Array, int], jax.Array]
) -> QuantizedExperts:
    up, down = quantized

    def of_layout(x: Quantized, dimensions: tuple[str, str]) -> Quantized:
        axis = 1 + dimensions.index(INNER)
        return dataclasses.replace(
            x, values=reshape(x.values, axis), scales=reshape(x.scales, axis)
        )

    return QuantizedWeights(*map(of_layout, up.layouts, _DIMENSIONS[0])), down


def _split_shape(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    size = shape[axis]
    halves = (1, 1) if size == 1 else (2, size // 2)  # one scale is of both
    return *shape[:axis], *halves, *shape[axis + 1 :]
