"""Pickling a layer whose mesh is an option: devices cannot be pickled, and are found by number."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jax_ep._src.core.errors import ArgumentError
from jax_ep._src.layer.router import LAYER


class SavedMesh(NamedTuple):
    """A mesh, with the numbers of its devices."""

    platform: str
    device_ids: Any  # int array of the mesh's shape
    axis_names: tuple[Any, ...]
    axis_types: tuple[Any, ...]


def without_devices(state: dict[str, Any]) -> dict[str, Any]:
    """Replaces the mesh in a layer's attributes by what can be pickled."""
    mesh = state.get("mesh")
    if not isinstance(mesh, Mesh):
        return dict(state)
    ids = np.vectorize(lambda device: device.id, otypes=[int])(mesh.devices)
    saved = SavedMesh(mesh.devices.flat[0].platform, ids, mesh.axis_names, mesh.axis_types)
    return state | {"mesh": saved}


def with_devices(state: dict[str, Any]) -> dict[str, Any]:
    """Restores the mesh, on this process's devices of the same numbers."""
    saved = state.get("mesh")
    if not isinstance(saved, SavedMesh):
        return dict(state)
    there = {device.id: device for device in jax.devices(saved.platform)}
    if missing := set(saved.device_ids.flat) - set(there):
        raise ArgumentError(
            f"jax_ep.{LAYER}: the pickled layer's mesh= has device {min(missing)} of "
            f"{saved.platform}, and there are {len(there)}; expected the devices on which it was "
            "made. Pickle a layer without mesh=, and call it under jax.set_mesh(mesh)."
        )
    devices = np.vectorize(there.__getitem__, otypes=[object])(saved.device_ids)
    return state | {"mesh": Mesh(devices, saved.axis_names, axis_types=saved.axis_types)}
