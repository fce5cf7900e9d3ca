"""Files of safetensors that are written tensor by tensor, in any order."""

from __future__ import annotations

import json
import os
import pathlib
import struct
from typing import Any, NamedTuple

import numpy as np

from jax_ep._src.checkpoints.pieces import Array
from jax_ep._src.checkpoints.tensors import NAMES


class Shape(NamedTuple):
    """The size of a tensor that will be written."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def num_bytes(self) -> int:
        """Its bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class File:
    """A file under a temporary name, until `finish`."""

    def __init__(self, path: pathlib.Path, shapes: dict[str, Shape]):
        self._path, self._temporary = path, path.with_name(f".{path.name}.part")
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, one in shapes.items():
            begin, end = end, end + one.num_bytes
            dtype, shape = NAMES[one.dtype], list(one.shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._start = 8 + len(text)
        self._offsets = {name: header[name]["data_offsets"][0] for name in shapes}
        self._file = self._temporary.open("wb")
        self._file.write(struct.pack("<Q", len(text)) + text)
        self._file.truncate(self._start + end)

    def write(self, name: str, values: Array) -> None:
        """Writes one of the tensors."""
        self._file.seek(self._start + self._offsets[name])
        self._file.write(np.ascontiguousarray(values).view(np.uint8).data)

    def finish(self) -> None:
        """Gives the file its name, once it is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._temporary.replace(self._path)
