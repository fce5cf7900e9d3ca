"""Which mesh a layer runs on."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from jax_ep._src.core import compat
from jax_ep._src.core.errors import ArgumentError
from jax_ep._src.layer.config import Config
from jax_ep._src.layer.router import LAYER


def find_mesh(config: Config, arrays: list[Any]) -> Mesh | AbstractMesh:
    """The mesh of a call, from the first of these that knows one.

    The context (a `shard_map`, `jax.set_mesh`), the layer's ``mesh=``, a ``with mesh:`` block, the
    shardings of `arrays`. Arrays on one device, or a process with one device, need none.

    Raises:
      ArgumentError: the context and ``mesh=`` differ, or nothing tells the mesh.
    """
    mesh = given_mesh(config.mesh)
    if mesh is not None:
        return mesh
    values = [compat.concrete(array) for array in arrays]
    for array, value in zip(arrays, values, strict=True):
        mesh = compat.mesh_of(array if value is None else value)
        if mesh is not None:
            return mesh
    on_one_device = all(value is not None and compat.is_on_one_device(value) for value in values)
    if on_one_device or jax.device_count() == 1:
        return one_device_mesh(config)
    raise ArgumentError(
        f"jax_ep.{LAYER}: no mesh is known here, and {jax.device_count()} devices exist; expected "
        "one that says which of them hold the experts. Give mesh= to the layer, or call it under "
        "jax.set_mesh(mesh). For one device that is jax.make_mesh((1,), ('expert',))."
    )


def given_mesh(argument: Mesh | AbstractMesh | None) -> Mesh | AbstractMesh | None:
    """The mesh in context, the argument, or that of a ``with mesh:`` block; None without any."""
    context = jax.sharding.get_abstract_mesh()
    if context.empty:
        return argument if argument is not None else compat.with_block_mesh()
    if argument is not None and dict(argument.shape) != dict(context.shape):
        raise ArgumentError(
            f"jax_ep.{LAYER}: mesh= has the axes {dict(argument.shape)}, but the mesh in context "
            f"has {dict(context.shape)}; expected one mesh. Leave mesh= out to use the context's."
        )
    return context


def one_device_mesh(config: Config) -> AbstractMesh:
    """All axes of the layer, of size 1."""
    names = tuple(dict.fromkeys((*config.axes.tokens, *config.axes.expert, *config.axes.tensor)))
    return AbstractMesh((1,) * len(names), names, axis_types=(AxisType.Auto,) * len(names))
