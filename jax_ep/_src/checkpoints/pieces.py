"""Parameters as boxes that tensors of a file fill, and the reading of any part of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
View = Callable[[Array], Array]


class Piece(NamedTuple):
    """A tensor, or a part of it, that fills a box of a parameter.

    Attributes:
      at: the box: an index or a slice for each of the parameter's first dimensions.
      name: the tensor.
      view: from the tensor to the box, by numpy views only, which also write into a new tensor.
      shape: the shape of the tensor.
      part: an index into the tensor's first dimension, if the rest of it fills other boxes.
    """

    at: tuple[int | slice, ...]
    name: str
    view: View
    shape: tuple[int, ...]
    part: int | None = None


def same(x: Array) -> Array:
    """[...] as it is."""
    return x


def transposed(x: Array) -> Array:
    """[..., out, in] as [..., in, out]."""
    return x.swapaxes(-1, -2)


def gate_first_rows(x: Array) -> Array:
    """[..., 2F, H] with the gate first as [..., H, 2, F]."""
    return np.moveaxis(x.reshape(*x.shape[:-2], 2, -1, x.shape[-1]), -1, -3)


def gate_first(x: Array) -> Array:
    """[..., 2F] with the gate first as [..., 2, F]."""
    return x.reshape(*x.shape[:-1], 2, -1)


def interleaved(x: Array) -> Array:
    """[..., 2F] of columns g0, u0, g1, u1, … as [..., 2, F]."""
    return x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2)


def interleaved_rows(x: Array) -> Array:
    """[..., 2F, H] of rows g0, u0, g1, u1, … as [..., H, 2, F]."""
    return interleaved(x.swapaxes(-1, -2))


def gate_and_up_rows(x: Array) -> Array:
    """[E, 2F, K / 32, 16 or nothing] of rows g0, u0, g1, u1, … as [E, 2, F, K / 2 or K / 32]."""
    return x.reshape(x.shape[0], x.shape[1] // 2, 2, -1).swapaxes(1, 2)


def joined_blocks(x: Array) -> Array:
    """[E, H, K / 32, 16 or nothing] as [E, H, K / 2 or K / 32]."""
    return x.reshape(*x.shape[:2], -1)


Bounds = tuple[tuple[int, int], ...]


def bounds_of(index: Sequence[Any], shape: Sequence[int]) -> Bounds:
    """Returns first and end of each dimension of a device's index."""
    return tuple(i.indices(size)[:2] for i, size in zip(index, shape, strict=True))


class Overlap(NamedTuple):
    """The part of a box that lies within bounds."""

    in_block: tuple[int | slice, ...]
    in_piece: tuple[slice, ...]


def _whole(at: Sequence[int | slice], shape: Sequence[int]) -> tuple[int | slice, ...]:
    """Returns a box with all dimensions of the shape."""
    return (*at, *(slice(None),) * (len(shape) - len(at)))


def overlap(at: Sequence[int | slice], bounds: Bounds, shape: Sequence[int]) -> Overlap | None:
    """Returns where a box and bounds meet, or None."""
    in_block: list[int | slice] = []
    in_piece = []
    for box, (first, end), size in zip(_whole(at, shape), bounds, shape, strict=True):
        if isinstance(box, int):
            if not first <= box < end:
                return None
            in_block.append(box - first)
            continue
        start, stop, _ = box.indices(size)
        low, high = max(start, first), min(stop, end)
        if low >= high:
            return None
        in_block.append(slice(low - first, high - first))
        in_piece.append(slice(low - start, high - start))
    return Overlap(tuple(in_block), tuple(in_piece))


def box_shape(at: Sequence[int | slice], shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of a box."""
    boxes = _whole(at, shape)
    sizes = (b if isinstance(b, int) else b.indices(s) for b, s in zip(boxes, shape, strict=True))
    return tuple(size[1] - size[0] for size in sizes if not isinstance(size, int))
