"""Folders of safetensors files: headers, memory maps, and counts of what is read.

The format is eight bytes with the header's length, a JSON header of names, dtypes, shapes and
offsets, and the values. The maps know E4M3 and E8M0, which the package safetensors cannot read as
numpy.
"""

from __future__ import annotations

import json
import pathlib
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_ep._src.core.errors import ArgumentError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "U32": np.uint32,
    "I32": np.int32,
    "F32": np.float32,
    "U64": np.uint64,
    "I64": np.int64,
    "F64": np.float64,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2,
    "F8_E8M0": jnp.float8_e8m0fnu,
}
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


class Entry(NamedTuple):
    """Says where a tensor is."""

    path: pathlib.Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int


class Tensors(Mapping[str, Entry]):
    """The tensors of a folder by name, as its index or its only file lists them.

    Attributes:
      bytes_read: the size of what `read` has returned so far.
    """

    def __init__(self, folder: pathlib.Path, single: str = SINGLE):
        self.folder = folder
        self.bytes_read = 0
        self._maps: dict[pathlib.Path, np.ndarray[Any, Any]] = {}
        self._entries: dict[str, Entry] = {}
        for path, names in _files(folder, single).items():
            found = _header(path)
            missing = set(found if names is None else names) - set(found)
            if missing:
                raise ArgumentError(
                    f"jax_ep.checkpoints: {path} lacks {some(missing)}, which {INDEX} lists in "
                    "it; expected every tensor in its file. Copy the file again."
                )
            self._entries |= {n: e for n, e in found.items() if names is None or n in names}

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def view(self, name: str) -> np.ndarray[Any, Any]:
        """Returns a tensor as a memory map, of which nothing is read yet."""
        path, dtype, shape, offset = self[name]
        if path not in self._maps:
            self._maps[path] = np.memmap(path, np.uint8, "r")
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        values = np.asarray(self._maps[path])[offset : offset + size]
        return values.view(dtype).reshape(shape)

    def count(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns what is about to be read, after counting its bytes."""
        self.bytes_read += values.nbytes
        return values


def _files(folder: pathlib.Path, single: str) -> dict[pathlib.Path, set[str] | None]:
    """Returns the files of a folder, each with the names that the index has for it."""
    if single == SINGLE and (folder / INDEX).exists():
        files: dict[pathlib.Path, set[str] | None] = {}
        for name, file in json.loads((folder / INDEX).read_text())["weight_map"].items():
            names = files.setdefault(folder / file, set())
            assert names is not None
            names.add(name)
    else:
        files = {folder / single: None}
    for path in files:
        if not path.exists():
            raise ArgumentError(
                f"jax_ep.checkpoints: {path} does not exist; expected {INDEX} with all files that "
                f"it lists, or {SINGLE}. Download the whole checkpoint, in safetensors."
            )
    return files


def _header(path: pathlib.Path) -> dict[str, Entry]:
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
        listed = json.loads(file.read(length)) if length <= size - 8 else {"": {}}
    listed.pop("__metadata__", None)
    end = max((e["data_offsets"][1] for e in listed.values() if e), default=0)
    if "" in listed or 8 + length + end != size:
        raise ArgumentError(
            f"jax_ep.checkpoints: {path} has {size} bytes; expected as many as its safetensors "
            "header says. Copy the file again."
        )
    return {name: _entry(path, name, value, 8 + length) for name, value in listed.items()}


def _entry(path: pathlib.Path, name: str, value: dict[str, Any], start: int) -> Entry:
    if value["dtype"] not in DTYPES:
        raise ArgumentError(
            f"jax_ep.checkpoints: {name} has the dtype {value['dtype']}; expected one of "
            f"{tuple(DTYPES)}. Convert the checkpoint to one of these."
        )
    dtype = np.dtype(DTYPES[value["dtype"]])
    return Entry(path, dtype, tuple(value["shape"]), start + value["data_offsets"][0])


def some(names: Any) -> str:
    """Returns a few names, sorted, and how many more there are."""
    first = sorted(names)
    more = f" and {len(first) - 4} more" if len(first) > 4 else ""
    return ", ".join(first[:4]) + more
