"""How many ranks of a layer reach each other over NVLink, as its mesh's devices tell."""

from __future__ import annotations

import dataclasses
import itertools
import math

from jax.sharding import AbstractMesh, Mesh

from jax_ep._src.core import compat
from jax_ep._src.core.errors import ArgumentError
from jax_ep._src.core.expert_axis import ExpertAxis
from jax_ep._src.core.make_mesh import host_of
from jax_ep._src.layer.config import Config
from jax_ep._src.layer.router import LAYER


def with_domains(config: Config, mesh: Mesh | AbstractMesh) -> Config:
    """The options, with the NVLink domains of the mesh's devices if they are known and not given.

    Every process has the same mesh, so that all propose the same.

    Raises:
      ArgumentError: the ranks of a host are not next to each other along the expert axis.
    """
    names = config.axes.within(frozenset(mesh.axis_names)).expert
    if config.nvlink_domain_size is not None or config.local_only or not names:
        return config
    devices = compat.devices_of(mesh)
    if devices is None:
        return config
    axis = ExpertAxis(names, tuple(mesh.shape.items()))
    lengths: set[int] = set()
    for ids in axis.replica_groups():
        hosts = [host_of(device) for device in devices.ravel()[ids]]
        runs = [(host, len(list(ranks))) for host, ranks in itertools.groupby(hosts)]
        if len(runs) > len(set(hosts)):
            raise ArgumentError(
                f"jax_ep.{LAYER}: along expert_axis={config.expert_axis!r} ranks are on the hosts "
                f"{hosts}; expected those of each host next to each other. Make the mesh by "
                f"jax_ep.make_mesh({tuple(mesh.shape.values())}, {mesh.axis_names}, "
                f"expert_axis={config.expert_axis!r})."
            )
        lengths.update(length for _, length in runs)
    size = math.gcd(*lengths)
    return config if size == axis.size else dataclasses.replace(config, nvlink_domain_size=size)
