"""Reads arrays from files, device by device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jax_ep._src.checkpoints.dequantize import from_blocks, from_mxfp4
from jax_ep._src.checkpoints.names import PACKED, SCALE
from jax_ep._src.checkpoints.pieces import Array, Bounds, Piece, bounds_of, overlap
from jax_ep._src.checkpoints.tensors import Tensors


class Reader:
    """The tensors of a folder, with floats in place of packed ones.

    Args:
      tensors: the files'.
      packing: "fp8", "mxfp4" or None.
      dequantizes_all: whether floats take the place of every tensor in blocks, and not only of
        those that parameters ask for without naming their scales.
    """

    def __init__(self, tensors: Tensors, packing: str | None, *, dequantizes_all: bool):
        self.tensors = tensors
        self.packing = packing
        self.dequantizes_all = dequantizes_all

    def files(self, name: str) -> tuple[str, ...]:
        """Returns the tensors of the files that one is computed from."""
        if self.packing == "mxfp4" and name + PACKED[0] in self.tensors:
            return (name + PACKED[0], name + PACKED[1])
        if self.packing == "fp8" and name + SCALE in self.tensors:
            return (name, name + SCALE)
        return (name,)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape of a tensor after unpacking, or None if it is not there."""
        first = self.files(name)[0]
        if any(file not in self.tensors for file in self.files(name)):
            return None
        shape = self.tensors[first].shape
        return (*shape[:-2], 32 * shape[-2]) if first != name else shape

    def is_packed(self, name: str, raw: bool) -> bool:
        """Whether a tensor is dequantized, unless its values are asked for as they are."""
        return len(self.files(name)) > 1 and not raw

    def dtype(self, name: str, raw: bool) -> np.dtype[Any]:
        """Returns the dtype of a tensor after unpacking."""
        packed = self.is_packed(name, raw)
        return np.dtype(jnp.bfloat16) if packed else self.tensors[name].dtype

    def array(
        self,
        shape: tuple[int, ...],
        sharding: Sharding,
        parts: Sequence[Piece],
        dtype: np.dtype[Any],
        *,
        raw: bool = False,
    ) -> jax.Array:
        """Makes an array from what fills it, and of zeros elsewhere, block by block.

        One block is on the host at a time. `jax.make_array_from_callback` would keep those of all
        devices of the process, and read once more what several of them have.
        """
        made: dict[Bounds, jax.Array] = {}
        arrays = []
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            bounds = bounds_of(index or (), shape)
            if bounds in made:
                arrays.append(jax.device_put(made[bounds], device))
                continue
            block = self._block(bounds, shape, parts, dtype, raw)
            made[bounds] = jax.device_put(block, device)
            made[bounds].block_until_ready()
            arrays.append(made[bounds])
        return jax.make_array_from_single_device_arrays(shape, sharding, arrays)

    def _block(
        self,
        bounds: Bounds,
        shape: tuple[int, ...],
        parts: Sequence[Piece],
        dtype: np.dtype[Any],
        raw: bool,
    ) -> Array:
        block = np.zeros([end - first for first, end in bounds], dtype)
        for piece in parts:
            both = overlap(piece.at, bounds, shape)
            if both is not None:
                values = piece.view(self._values(piece, raw))[both.in_piece]
                if not self.is_packed(piece.name, raw):
                    self.tensors.count(values)
                block[both.in_block] = values.astype(dtype, copy=False)
        return block

    def _values(self, piece: Piece, raw: bool) -> Array:
        """Returns a tensor, or the part of it: a memory map, or floats of a packed one."""
        part: Any = slice(None) if piece.part is None else piece.part
        if not self.is_packed(piece.name, raw):
            return self.tensors.view(piece.name)[part]
        values, scales = (
            self.tensors.count(self.tensors.view(name)[part]) for name in self.files(piece.name)
        )
        return (
            from_mxfp4(values, scales) if self.packing == "mxfp4" else from_blocks(values, scales)
        )
