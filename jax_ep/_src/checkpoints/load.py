"""Loads a checkpoint onto a mesh, parameter by parameter."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jax_ep._src.checkpoints.checkpoint import Checkpoint, Params
from jax_ep._src.checkpoints.config import entry, of_text, quantization, read_config
from jax_ep._src.checkpoints.names import (
    KEPT_PARAMS,
    SCALE,
    Pieces,
    is_ignored,
    kept_shapes,
    layout_of,
    pieces_of,
)
from jax_ep._src.checkpoints.options import family_of, kept_format, moe_layers, moe_options
from jax_ep._src.checkpoints.pieces import Piece, same
from jax_ep._src.checkpoints.read import Reader
from jax_ep._src.checkpoints.tensors import Tensors, some
from jax_ep._src.core import compat
from jax_ep._src.core.errors import ArgumentError, MissingExtensionError
from jax_ep._src.core.expert_axis import AxisName
from jax_ep._src.core.primitive import warn_once
from jax_ep._src.layer.config import Config, check_mesh, spec_entry
from jax_ep._src.layer.mesh import given_mesh
from jax_ep._src.layer.padded_experts import num_padded_experts
from jax_ep._src.layer.parameters import parameters
from jax_ep._src.quant.formats import Format
from jax_ep._src.quant.microscaling import MxFp4
from jax_ep._src.quant.quantized import Quantized
from jax_ep._src.quant.recipe import QuantizedExperts, QuantizedWeights

OtherSpecs = Callable[[str, tuple[int, ...]], P | None]
"""From a tensor's name and shape to its partition spec, or to None to leave it out."""

ROUTING = ("router_kernel", "logits_bias", "selection_bias")


def load(
    folder: str | pathlib.Path,
    *,
    mesh: Mesh | None = None,
    expert_axis: AxisName | None = "expert",
    fsdp_axis: str | None = None,
    tensor_axis: str | None = None,
    stacked: bool = False,
    dtype: DTypeLike | None = None,
    dequantize: bool = False,
    other: OtherSpecs | None = None,
    progress: bool = False,
) -> Checkpoint:
    """Loads a checkpoint of Hugging Face's transformers for `jax_ep.nnx.MoE` and `linen.MoE`.

    Files are memory-mapped, and each process reads only what its devices hold::

        loaded = checkpoints.load(folder, mesh=mesh)
        make = lambda: jax_ep.nnx.MoE(**checkpoints.moe_options(folder), rngs=nnx.Rngs(0))
        layer = nnx.eval_shape(make)  # nothing is initialized
        nnx.update(layer, loaded.layers[3])

    Args:
      folder: config.json, and safetensors in one file or several with their index.
      mesh: the mesh to load onto; by default that of the context, otherwise one device.
      expert_axis: the axis, or axes, over which experts are sharded, as for the layer. If E does
        not divide, rows of zeros are added, as the layer has them.
      fsdp_axis: as for the layer.
      tensor_axis: as for the layer.
      stacked: makes one stack [layers, ...] of all layers with experts.
      dtype: the dtype of parameters that are floats; None keeps the file's. Router weights and
        biases of logits and of the selection stay float32 if they are so in the file, and experts
        in eight or four bits stay as they are.
      dequantize: makes bfloat16 of experts in eight or four bits as well. Blocks of 128 x 128
        always become bfloat16 if 128 does not divide F, with a warning.
      other: from the name and the shape of another tensor to its spec on the mesh, or to None to
        leave it out. By default all are loaded, whole on every device.
      progress: shows a bar, by the package rich.

    Returns:
      A `Checkpoint`, whose arrays are sharded as the layer's parameters are.

    Raises:
      ArgumentError (a ValueError): an architecture that is not known, tensors that are missing or
        have another shape, a file that is not whole, or a mesh that does not fit.
      MissingExtensionError (an ImportError): ``progress=True`` without rich.
    """
    axes = {"expert_axis": expert_axis, "fsdp_axis": fsdp_axis, "tensor_axis": tensor_axis}
    plan = _plan(pathlib.Path(folder), mesh, axes, dtype, dequantize)
    groups = {i: {n: list(ps) for n, ps in of.items()} for i, of in plan.pieces.items()}
    if stacked and groups:
        groups = {plan.indices[0]: _stacked(list(groups.values()))}
    others = plan.others(other)
    lead = (len(plan.indices),) if stacked else ()
    layers: dict[int, Params] = {i: {} for i in groups}
    found: Params = {}
    with _progress(sum(map(len, groups.values())) + len(others), progress) as advance:
        for i, params in groups.items():
            for name, parts in params.items():
                layers[i][name] = plan.parameter(name, parts, lead)
                advance()
        for name, spec in others.items():
            found[name] = plan.other(name, spec)
            advance()
    quantized: dict[int, QuantizedExperts] = {}
    if plan.kept is not None:
        quantized = {i: _joined(params, plan.kept) for i, params in layers.items()}
    used = {file for name in plan.used for file in plan.reader.files(name)}
    used |= {file for name in found for file in plan.reader.files(name)}
    return Checkpoint(
        config=plan.config,
        layers=layers,
        quantized=quantized,
        other=found,
        ignored=tuple(name for name in plan.reader.tensors if name not in used),
        layer_indices=plan.indices,
        is_stacked=stacked,
        bytes_read=plan.reader.tensors.bytes_read,
        folder=plan.reader.tensors.folder,
        file_dtypes={name: plan.reader.tensors[name].dtype for name in sorted(used)},
    )


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Names the tensors to read, and the parameters that they fill."""

    config: dict[str, Any]
    reader: Reader
    mesh: Mesh | None
    indices: tuple[int, ...]
    pieces: dict[int, Pieces]
    shapes: dict[str, tuple[int, ...]]
    specs: dict[str, P]
    dtype: np.dtype[Any] | None
    kept: Format | None

    @property
    def used(self) -> set[str]:
        """The tensors that fill parameters."""
        return {p.name for of in self.pieces.values() for ps in of.values() for p in ps}

    def others(self, choose: OtherSpecs | None) -> dict[str, P]:
        """Returns the specs of all other tensors that are wanted."""
        family, reader = family_of(self.config), self.reader
        count = entry(of_text(self.config), "num_hidden_layers")
        used = {file for name in self.used for file in reader.files(name)}
        specs = {}
        for name in sorted({*reader.tensors} - used):
            if is_ignored(family, name, count) or self._is_scale(name):
                continue
            spec = P() if choose is None else choose(name, reader.tensors[name].shape)
            if spec is not None:
                specs[name] = spec
        return specs

    def _is_scale(self, name: str) -> bool:
        """Whether a tensor is the scale of another that is dequantized."""
        values = name.removesuffix(SCALE)
        return self.reader.dequantizes_all and values != name and values in self.reader.tensors

    def parameter(self, name: str, parts: list[Piece], lead: tuple[int, ...]) -> jax.Array:
        """Loads a parameter, or a stack of them."""
        raw = name in KEPT_PARAMS
        dtypes = [self.reader.dtype(piece.name, raw) for piece in parts]
        dtype = functools.reduce(jnp.promote_types, dtypes[1:], dtypes[0])
        if raw:
            is_float = dtype != np.uint8 and name.endswith("scales")
            dtype = np.dtype(np.float32) if is_float else dtype
        elif self.dtype is not None and not (name in ROUTING and dtype == np.float32):
            dtype = self.dtype
        spec = P(None, *self.specs[name]) if lead else self.specs[name]
        shape = (*lead, *self.shapes[name])
        return self.reader.array(shape, self._sharding(spec), parts, dtype, raw=raw)

    def other(self, name: str, spec: P) -> jax.Array:
        """Loads another tensor as it is, but floats in the dtype that was asked for."""
        raw = not self.reader.dequantizes_all
        shape, dtype = self.reader.tensors[name].shape, self.reader.dtype(name, raw)
        is_float = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1
        is_scale = name.endswith(SCALE) or name + SCALE in self.reader.tensors
        if self.dtype is not None and is_float and not (raw and is_scale):
            dtype = self.dtype
        whole = [Piece((), name, same, shape)]
        return self.reader.array(shape, self._sharding(spec), whole, dtype, raw=raw)

    def _sharding(self, spec: P) -> Sharding:
        if self.mesh is None:
            return SingleDeviceSharding(jax.local_devices()[0])
        return NamedSharding(self.mesh, spec)


def _plan(
    folder: pathlib.Path,
    mesh: Mesh | None,
    axes: dict[str, Any],
    dtype: DTypeLike | None,
    dequantize: bool,
) -> _Plan:
    config = read_config(folder)
    family, options = family_of(config), moe_options(config, dequantize=dequantize)
    named = {name: value for name, value in options.items() if name != "router"}
    layer = Config(**named, **axes)
    found: Any = given_mesh(mesh)
    if found is not None:
        check_mesh(layer, found)
        found = compat.with_devices(found)
    tensors, packing = Tensors(folder), quantization(config)
    kept = kept_format(config, dequantize)
    reader = Reader(tensors, packing, dequantizes_all=packing == "fp8" and kept is None)
    if reader.dequantizes_all and not dequantize:
        warn_once(
            f"fp8 {folder}",
            f"jax_ep.checkpoints: the blocks of 128 x 128 are dequantized to bfloat16, as experts "
            f"have F={layer.intermediate_size}; expected a multiple of 128, by which gate and up "
            "can be joined. Give dequantize=True to have no warning.",
        )
    indices = moe_layers(config)
    pieces = {
        i: pieces_of(
            family,
            i,
            options,
            layout_of(family, i, tensors),
            packed=packing == "mxfp4",
            kept=kept,
        )
        for i in indices
    }
    _check(reader, pieces)
    layer_axes = layer.axes if found is None else layer.axes_on(found)
    padded = num_padded_experts(layer, found)
    made = parameters(layer, layer_axes, padded)
    shapes = {name: p.shape for name, p in made.items()} | {"selection_bias": (layer.num_experts,)}
    specs = {name: p.spec for name, p in made.items()} | {"selection_bias": P()}
    if kept is not None:
        shapes |= kept_shapes(options, kept, padded)
        specs |= dict.fromkeys(KEPT_PARAMS, P(spec_entry(layer_axes.expert)))
    wanted = None if dtype is None else jnp.dtype(dtype)
    return _Plan(config, reader, found, indices, pieces, shapes, specs, wanted, kept)


def _check(reader: Reader, pieces: dict[int, Pieces]) -> None:
    """Raises unless all tensors are there in the shapes that the config says."""
    expected = {p.name: p.shape for of in pieces.values() for ps in of.values() for p in ps}
    missing = {n: s for n, s in expected.items() if reader.shape(n) is None}
    if missing:
        raise ArgumentError(
            f"jax_ep.checkpoints: {reader.tensors.folder} lacks {some(missing)}; expected them by "
            "config.json, with shapes "
            f"{[missing[n] for n in sorted(missing)[:4]]}. Download all files, or mend the config."
        )
    wrong = {n: s for n, s in expected.items() if reader.shape(n) != s}
    if wrong:
        found = [reader.shape(n) for n in sorted(wrong)[:4]]
        raise ArgumentError(
            f"jax_ep.checkpoints: {some(wrong)} have the shapes {found}; expected "
            f"{[wrong[n] for n in sorted(wrong)[:4]]} by config.json. Give the config that belongs "
            "to these files."
        )


def _stacked(layers: list[Pieces]) -> Pieces:
    return {
        name: [p._replace(at=(i, *p.at)) for i, of in enumerate(layers) for p in of[name]]
        for name in layers[0]
    }


def _joined(params: Params, format: Format) -> QuantizedExperts:
    """Takes the quantized arrays out of a layer's parameters."""
    values, scales, down_values, down_scales = (params.pop(name) for name in KEPT_PARAMS)
    if isinstance(format, MxFp4):
        up = _from_bytes(values, scales, True)
        down = _from_bytes(down_values, down_scales, False)
    else:
        up, down = Quantized(values, scales, format), Quantized(down_values, down_scales, format)
    return QuantizedWeights(up), QuantizedWeights(down)


@functools.partial(jax.jit, static_argnums=2)
def _from_bytes(values: jax.Array, scales: jax.Array, is_up: bool) -> Quantized:
    """Takes the bytes of w_up [..., 2, F, K / 2] or of w_down [..., H, K / 2], and their scales."""
    if is_up:
        values, scales = (a.reshape(*a.shape[:-3], -1, a.shape[-1]) for a in (values, scales))
    return Quantized.from_packed(values, scales, MxFp4())


@contextlib.contextmanager
def _progress(total: int, shown: bool) -> Iterator[Callable[[], None]]:
    """Yields what is called after each array."""
    if not shown:
        yield lambda: None
        return
    try:
        from rich.progress import Progress
    except ImportError:
        raise MissingExtensionError(
            "jax_ep.checkpoints: progress=True needs the package rich, which cannot be imported. "
            'Install it: pip install "jax_ep[checkpoints]".'
        ) from None
    with Progress() as bar:
        task = bar.add_task("load", total=total)
        yield lambda: bar.advance(task)
