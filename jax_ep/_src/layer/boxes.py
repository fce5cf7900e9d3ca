"""The box of flax.linen that a layer's parameters are made in."""

from __future__ import annotations

from typing import Any

import jax
from flax import linen as nn
from flax import struct
from flax.linen.spmd import logical_to_mesh_axes
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


class Partitioned(nn.Partitioned[Any]):
    """A `flax.linen.Partitioned` that translates the names of dimensions that were added.

    The layer's own names are mesh axes. `nn.scan` and `nn.vmap` may add another, such as
    "layers": if it is no mesh axis, `nn.logical_axis_rules` translate it, and without a rule its
    dimension is not sharded.

    Attributes:
      mesh_axes: the mesh axes that the layer knew.
    """

    mesh_axes: tuple[str, ...] = struct.field(default=(), pytree_node=False)

    def get_partition_spec(self) -> P:
        """Returns the partition spec, of mesh axes only."""
        return self._spec(self.mesh)

    def get_sharding(self, mesh: Mesh) -> NamedSharding:
        """Returns the sharding over this mesh."""
        return NamedSharding(mesh, self._spec(mesh))

    def _spec(self, mesh: Mesh | AbstractMesh | None) -> P:
        mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
        known = {*self.mesh_axes, *mesh.axis_names}
        rules = tuple(nn.get_logical_axis_rules())

        def is_known(name: Any) -> bool:
            names = name if isinstance(name, tuple) else (name,)
            return name is None or known.issuperset(names)

        def translated(name: Any) -> Any:
            (axes,) = logical_to_mesh_axes((name,), rules) or (None,)
            return axes

        return P(*(name if is_known(name) else translated(name) for name in self.names))
