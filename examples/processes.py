"""One process, or one of several: `jax.distributed` is the only set-up."""

from __future__ import annotations

import collections
import math
import os
import pathlib
import sys
import tempfile

import jax


def join(*, distributed: bool) -> None:
    """Joins the other processes if launch.py, or else SLURM or Kubernetes, has started this one."""
    if launched := os.environ.get("EXAMPLE_PROCESS"):
        coordinator, count, process, gpu = launched.split(",")
        jax.distributed.initialize(coordinator, int(count), int(process), local_device_ids=int(gpu))
    elif distributed:
        jax.distributed.initialize()


def devices_per_host() -> int:
    """The largest number that divides the devices of every host, which JAX calls a slice."""
    hosts = collections.Counter(getattr(device, "slice_index", 0) for device in jax.devices())
    return math.gcd(*hosts.values())


def output_folder(folder: pathlib.Path) -> pathlib.Path:
    """The folder for results. Those of the first process count: the others keep quiet."""
    if jax.process_index() > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        folder = pathlib.Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    return folder
