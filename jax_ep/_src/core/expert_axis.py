"""The expert axis: which ranks exchange tokens with each other."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

AxisName = str | tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ExpertAxis:
    """One or several manual mesh axes, flattened row-major in the order given, hashed by value.

    Attributes:
      name: the axis name, or the tuple of names, as `jax.lax` collectives take it. Without any
        name each device is a group of its own.
      mesh_shape: (name, size) of every axis of the mesh in context, in mesh order.
    """

    name: AxisName
    mesh_shape: tuple[tuple[str, int], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The axis name, or names, as a tuple."""
        return (self.name,) if isinstance(self.name, str) else self.name

    @property
    def size(self) -> int:
        """R, the number of ranks in a group."""
        sizes = dict(self.mesh_shape)
        return math.prod(sizes[name] for name in self.names)

    def replica_groups(self) -> np.ndarray:
        """Logical device ids, row-major over the mesh: int64[num_groups, R], ranks in order."""
        mesh_names = [name for name, _ in self.mesh_shape]
        sizes = [size for _, size in self.mesh_shape]
        ids = np.arange(math.prod(sizes), dtype=np.int64).reshape(sizes)
        expert_dims = [mesh_names.index(name) for name in self.names]
        other_dims = [dim for dim in range(len(sizes)) if dim not in expert_dims]
        return ids.transpose(other_dims + expert_dims).reshape(-1, self.size)
