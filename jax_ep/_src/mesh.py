"""The expert axis: which ranks exchange tokens with each other."""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np

from jax_ep._src.errors import ArgumentError

AxisName = str | tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ExpertAxis:
    """One or several manual mesh axes, flattened row-major in the order given, hashed by value.

    Attributes:
      name: the axis name, or the tuple of names, as `jax.lax` collectives take it.
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


def expert_axis(operation: str, axis_name: AxisName) -> ExpertAxis:
    """The expert axis named `axis_name` in the `shard_map` that is being traced.

    Raises:
      ArgumentError: `axis_name` is not one or several distinct axes of the mesh in context, or the
        call is not inside a `shard_map` that makes them manual.
    """
    mesh = jax.sharding.get_abstract_mesh()
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    if not names or len(set(names)) != len(names):
        raise ArgumentError(
            f"jax_ep.{operation}: axis_name={axis_name!r} names no axis or one axis twice. "
            "Give the name of the expert axis, or a tuple of distinct names."
        )
    wrap = f"jax.shard_map(..., axis_names={set(names)!r})"
    if mesh.empty:
        raise ArgumentError(
            f"jax_ep.{operation}: called outside shard_map (no mesh in context), with axis_name="
            f"{axis_name!r}. Call it in a function wrapped by {wrap}."
        )
    unknown = [name for name in names if name not in mesh.axis_names]
    if unknown:
        raise ArgumentError(
            f"jax_ep.{operation}: unknown axis {unknown[0]!r} in axis_name={axis_name!r}. "
            f"The mesh in context has the axes {mesh.axis_names}. Give one or several of these."
        )
    automatic = [name for name in names if name not in mesh.manual_axes]
    if automatic:
        raise ArgumentError(
            f"jax_ep.{operation}: called outside shard_map: axis {automatic[0]!r} of the mesh is "
            f"not manual here. Call it in a function wrapped by {wrap}."
        )
    name = names[0] if len(names) == 1 else names
    return ExpertAxis(name, tuple(mesh.shape.items()))
