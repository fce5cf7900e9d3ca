"""Saves a checkpoint in the names and layouts of the one that was loaded."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep._src.checkpoints.checkpoint import Checkpoint
from jax_ep._src.checkpoints.files import File, Shape
from jax_ep._src.checkpoints.names import KEPT_PARAMS, SCALE, layout_of, pieces_of
from jax_ep._src.checkpoints.options import family_of, moe_options
from jax_ep._src.checkpoints.pieces import Array, Bounds, Piece, bounds_of, box_shape, overlap, same
from jax_ep._src.checkpoints.tensors import INDEX, SINGLE
from jax_ep._src.core.errors import ArgumentError
from jax_ep._src.quant.microscaling import MxFp4
from jax_ep._src.quant.quantized import Quantized

COPIED = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")


def save(
    folder: str | pathlib.Path, checkpoint: Checkpoint, *, max_file_bytes: int = 5_000_000_000
) -> None:
    """Writes a checkpoint that transformers can read, in the names and layouts that it was read in.

    Every tensor is written in its array's dtype, so one that was loaded in the file's dtype is the
    same bit for bit. What was dequantized is written as it is, bfloat16, and
    ``quantization_config`` goes if nothing in eight or four bits is left. Tensors in
    `Checkpoint.ignored` are not written. With several processes all of them call this, with a
    folder that they share; each writes files of its own, and the index comes last::

        layers = loaded.layers | {3: nnx.to_pure_dict(nnx.state(layer))}  # all, of which 3 is new
        checkpoints.save("trained", dataclasses.replace(loaded, layers=layers))

    Args:
      folder: a new folder, or one without a checkpoint.
      checkpoint: as `load` returned it, or with other arrays of the same shapes, [E or more, H, 2,
        F] for w_up, in any dtypes. Rows of padding are left out.
      max_file_bytes: the size in bytes at which another file is begun.

    Raises:
      ArgumentError (a ValueError): a folder with a checkpoint, or parameters that are missing or
        have another shape.
    """
    path = pathlib.Path(folder)
    if any((path / name).exists() for name in (INDEX, SINGLE)):
        raise ArgumentError(
            f"jax_ep.checkpoints: {path} has a checkpoint already; expected a folder without "
            f"{INDEX} and {SINGLE}. Give a new one."
        )
    jobs = list(_jobs(checkpoint))
    path.mkdir(parents=True, exist_ok=True)
    shapes = {piece.name: shape for job in jobs for piece, shape in job.parts}
    owners = {
        piece.name: max(owner, 0)
        for job in jobs
        for (piece, _), owner in zip(job.parts, job.owners, strict=True)
    }
    weights = _files(shapes, owners, max_file_bytes)
    mine: dict[str, dict[str, Shape]] = {}
    for name, file in weights.items():
        if owners[name] == jax.process_index():
            mine.setdefault(file, {})[name] = shapes[name]
    files = {file: File(path / file, of) for file, of in mine.items()}
    for job in jobs:
        for name, values in job.tensors():
            files[weights[name]].write(name, values)
    for written in files.values():
        written.finish()
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("jax_ep.checkpoints.save")
    if jax.process_index() == 0:
        _copy_others(checkpoint, path)
        total = sum(shape.num_bytes for shape in shapes.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
        temporary = path / f".{INDEX}.part"
        temporary.write_text(json.dumps(index, indent=2) + "\n")
        temporary.replace(path / INDEX)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("jax_ep.checkpoints.saved")


@dataclasses.dataclass(frozen=True)
class _Job:
    """An array and the tensors that it is written to."""

    array: jax.Array
    parts: list[tuple[Piece, Shape]]

    @functools.cached_property
    def owners(self) -> list[int]:
        """The first process that has the whole of each tensor, or -1 if none has."""
        by_process: dict[int, set[Bounds]] = {}
        shape = self.array.shape
        devices: dict[Any, Any] = dict(self.array.sharding.devices_indices_map(shape))
        for device, index in devices.items():
            bounds = bounds_of(index or (), shape)
            by_process.setdefault(device.process_index, set()).add(bounds)
        owners = []
        for piece, _ in self.parts:
            wanted = math.prod(box_shape(piece.at, shape))
            having = (p for p, of in by_process.items() if _volume(piece, of, shape) == wanted)
            owners.append(min(having, default=-1))
        return owners

    def tensors(self) -> Iterator[tuple[str, Array]]:
        """Yields this process's tensors. All processes call it: arrays may have to be gathered."""
        array = self.array
        if min(self.owners, default=0) < 0:
            everywhere = NamedSharding(array.sharding.mesh, P())  # type: ignore[attr-defined]
            gather = jax.jit(_as_bytes, out_shardings=everywhere)
            array = gather(array)
        blocks: dict[Bounds, Array] = {}
        for (piece, shape), owner in zip(self.parts, self.owners, strict=True):
            if max(owner, 0) != jax.process_index():
                continue
            if not blocks:
                for shard in array.addressable_shards:
                    bounds = bounds_of(shard.index, array.shape)
                    if bounds not in blocks:
                        blocks[bounds] = np.asarray(shard.data).view(self.array.dtype)
            tensor = np.empty(shape.shape, shape.dtype)
            box = piece.view(tensor)
            for bounds, block in blocks.items():
                both = overlap(piece.at, bounds, array.shape)
                if both is not None:
                    box[both.in_piece] = block[both.in_block].astype(shape.dtype, copy=False)
            yield piece.name, tensor


def _as_bytes(x: jax.Array) -> jax.Array:
    """Returns eight-bit values as bytes: XLA may make 0 of their -0 on CPUs."""
    return jax.lax.bitcast_convert_type(x, np.uint8) if x.dtype.itemsize == 1 else x


@functools.partial(jax.jit, static_argnums=1)
def _to_bytes(x: Quantized, is_up: bool) -> tuple[jax.Array, jax.Array]:
    """Returns four-bit values two per byte, and scales, of w_up with gate and up apart."""
    values, scales = x.packed(), jax.lax.bitcast_convert_type(x.scales, np.uint8)
    if is_up:
        values, scales = (a.reshape(*a.shape[:-2], 2, -1, a.shape[-1]) for a in (values, scales))
    return values, scales


def _volume(piece: Piece, blocks: set[Bounds], shape: tuple[int, ...]) -> int:
    """Returns how many values of a box are in blocks that do not overlap."""
    found = (overlap(piece.at, bounds, shape) for bounds in blocks)
    return sum(math.prod(s.stop - s.start for s in o.in_piece) for o in found if o is not None)


def _jobs(checkpoint: Checkpoint) -> Iterator[_Job]:
    config, names = checkpoint.config, checkpoint.file_dtypes
    kept = next((up.forward.format for up, _ in checkpoint.quantized.values()), None)
    family, options = family_of(config), moe_options(config, dequantize=kept is None)
    for i in checkpoint.layer_indices:
        found = pieces_of(family, i, options, layout_of(family, i, names), kept=kept)
        key = checkpoint.layer_indices[0] if checkpoint.is_stacked else i
        lead = (checkpoint.layer_indices.index(i),) if checkpoint.is_stacked else ()
        if key not in checkpoint.layers:
            raise ArgumentError(
                f"jax_ep.checkpoints: layers has {sorted(checkpoint.layers)}, without {key}; "
                "expected all layers with experts. Add the new ones to those that load returned: "
                "loaded.layers | {index: params}."
            )
        arrays: dict[str, Any] = dict(checkpoint.layers[key])
        if kept is not None:
            up, down = (weights.forward for weights in checkpoint.quantized[key])
            quantized = (up.values, up.scales, down.values, down.scales)
            if isinstance(kept, MxFp4):
                quantized = (*_to_bytes(up, True), *_to_bytes(down, False))
            arrays |= dict(zip(KEPT_PARAMS, quantized, strict=True))
        for name, pieces in found.items():
            array: Any = arrays.get(name)
            parts = [piece._replace(at=(*lead, *piece.at)) for piece in pieces]
            parts = [p._replace(at=_without_padding(p, name, len(lead), options)) for p in parts]
            for p in parts:
                expected = p.view(np.broadcast_to(np.int8(0), p.shape)).shape
                given = None if array is None else box_shape(p.at, array.shape)
                if given != expected:
                    raise ArgumentError(
                        f"jax_ep.checkpoints: {name} of layer {i} has "
                        f"{'no array' if array is None else f'the shape {array.shape}'}, which "
                        f"gives {p.name} the shape {given}; expected {expected}. Give arrays of "
                        "the shapes that load returns."
                    )
            dtypes = ((p, names.get(p.name) if p.name.endswith(SCALE) else None) for p in parts)
            yield _Job(array, [(p, Shape(p.shape, d or np.dtype(array.dtype))) for p, d in dtypes])
    for name, array in checkpoint.other.items():
        yield _Job(array, [(Piece((), name, same, array.shape), Shape(array.shape, array.dtype))])


def _without_padding(
    piece: Piece, name: str, lead: int, options: dict[str, Any]
) -> tuple[int | slice, ...]:
    """Returns the box of a tensor that has all experts, without rows past the last of them."""
    of_experts = ("w_up", "w_down", "b_up", "b_down", *KEPT_PARAMS)
    if name in of_experts and len(piece.at) == lead:
        return (*piece.at, slice(0, options["num_experts"]))
    return piece.at


def _files(shapes: dict[str, Shape], owners: dict[str, int], limit: int) -> dict[str, str]:
    """Returns the file of each tensor; no two processes write to one."""
    numbers: dict[str, int] = {}
    number = 0
    for process in range(jax.process_count()):
        size = None
        for name in (name for name in shapes if owners[name] == process):
            if size is None or size + shapes[name].num_bytes > limit:
                number, size = number + 1, 0
            numbers[name], size = number, size + shapes[name].num_bytes
    return {name: f"model-{n:05}-of-{number:05}.safetensors" for name, n in numbers.items()}


def _copy_others(checkpoint: Checkpoint, folder: pathlib.Path) -> None:
    """Copies the tokenizer, and writes the config."""
    for path in sorted(checkpoint.folder.glob("*")):
        if path.suffix in COPIED and path.name not in ("config.json", INDEX):
            shutil.copyfile(path, folder / path.name)
    config = dict(checkpoint.config)
    before = config.get("quantization_config")
    if before is not None and checkpoint.quantized:
        scales = {n for n in checkpoint.file_dtypes if n.endswith(SCALE) and ".shared_expert" in n}
        weights = sorted(n.removesuffix(SCALE) for n in scales - set(checkpoint.other))
        listed = before.get("modules_to_not_convert") or []
        floats = [n.removesuffix(".weight") for n in weights]
        config["quantization_config"] = before | {"modules_to_not_convert": [*listed, *floats]}
    elif before is not None:
        del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
