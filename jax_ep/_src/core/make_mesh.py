"""Meshes over the devices of any number of hosts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jax_ep._src.core.errors import ArgumentError
from jax_ep._src.core.expert_axis import AxisName, ExpertAxis

Device = Any  # jax.Device, which tests stand in for


def make_mesh(
    axis_sizes: Sequence[int],
    axis_names: str | Sequence[str],
    axis_types: tuple[AxisType, ...] | None = None,
    *,
    expert_axis: AxisName = "expert",
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Makes a mesh like `jax.make_mesh`, also over several hosts, each of which keeps its experts.

    `jax.make_mesh` refuses the GPUs of several hosts, which are slices to JAX. Here the ranks along
    `expert_axis` are consecutive devices of one host, and the other axes span hosts. An expert axis
    that is larger than a host spans whole hosts, which only the pure-JAX implementation runs. On
    one host the mesh is the one that `jax.make_mesh` makes.

    For example::

        mesh = jax_ep.make_mesh((2, 4), ("data", "expert"))

    Args:
      axis_sizes: the size of each axis. If their product is smaller than the number of devices,
        the first devices are used.
      axis_names: the name of each axis.
      axis_types: the type of each axis; Explicit by default, as in JAX.
      expert_axis: the axis that holds experts, or several in the order of ranks; () for none.
      devices: `jax.devices()` by default. Give the same in every process.

    Returns:
      The mesh, which is the same in every process.

    Raises:
      ArgumentError: `expert_axis` names no axis of the mesh, or its ranks do not fit on the hosts.
    """
    names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
    expert_names = (expert_axis,) if isinstance(expert_axis, str) else tuple(expert_axis)
    if not set(expert_names) <= set(names) or len(set(expert_names)) < len(expert_names):
        raise ArgumentError(
            f"jax_ep.make_mesh: expert_axis={expert_axis!r} names no axis of the mesh, or one "
            f"twice; expected one or several of {names}. For a mesh without experts give ()."
        )
    devices = jax.devices() if devices is None else list(devices)
    hosts = by_host(devices)
    if len(hosts) == 1:
        return jax.make_mesh(axis_sizes, names, axis_types, devices=devices)
    sizes = tuple(int(size) for size in axis_sizes)
    count = math.prod(sizes)
    if len(sizes) != len(names) or min(sizes, default=0) < 1 or count > len(devices):
        raise ArgumentError(
            f"jax_ep.make_mesh: axis_sizes={sizes} of the axes {names}; expected a positive size "
            f"for each axis, and a product of at most {len(devices)}, the number of devices."
        )
    axis = ExpertAxis(expert_names, tuple(zip(names, sizes, strict=True)))
    groups = rank_groups(hosts, axis.size)
    if len(groups) * axis.size < count:
        each = sorted({len(host) for host in hosts})
        fitting = [n for n in range(1, each[0] + 1) if math.gcd(n, *each) == n]
        raise ArgumentError(
            f"jax_ep.make_mesh: axis_sizes={sizes} has {count // axis.size} groups of {axis.size} "
            f"ranks along expert_axis={expert_axis!r}, but {len(hosts)} hosts with "
            f"{_either(each)} devices hold {len(groups)}; expected a group of {_either(fitting)} "
            "ranks, inside a host, or of all ranks of several hosts. Change axis_sizes or devices."
        )
    chosen = np.empty(count, object)
    ids = axis.replica_groups()
    chosen[ids] = np.array(groups[: len(ids)], object)
    types = (AxisType.Explicit,) * len(names) if axis_types is None else axis_types
    return Mesh(chosen.reshape(sizes), names, axis_types=types)


def host_of(device: Device) -> int:
    """Returns the number of the host that a device is on."""
    return getattr(device, "slice_index", 0)


def by_host(devices: Sequence[Device]) -> list[list[Device]]:
    """Returns the devices of each host, which JAX numbers as slices of GPUs and CPUs."""
    hosts: dict[int, list[Device]] = {}
    for device in sorted(devices, key=lambda device: device.id):
        hosts.setdefault(host_of(device), []).append(device)
    return [hosts[index] for index in sorted(hosts)]


def rank_groups(hosts: Sequence[Sequence[Device]], size: int) -> list[list[Device]]:
    """Returns groups of `size` devices: inside hosts or, if none has as many, of whole hosts."""
    groups: list[list[Device]] = []
    if size <= max(map(len, hosts)):
        for host in hosts:
            starts = range(0, len(host) - size + 1, size)
            groups += [list(host[start : start + size]) for start in starts]
        return groups
    pending: list[Device] = []
    for host in hosts:
        pending += host
        if len(pending) > size:  # hosts of different sizes
            pending = list(host)
        if len(pending) == size:
            groups.append(pending)
            pending = []
    return groups


def _either(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))
