"""``python -m jax_ep.doctor.processes``: what each process of a program sees, and what fails.

Start it in every process as the program is started. SLURM and Kubernetes tell JAX who is who; in a
plain shell give the options. The first process prints a line for each process, what keeps them
apart, and the error of one layer over the devices of all of them, with experts inside each host.
Each process prints what its groups decide (JAX_EP_DEBUG).

Exit status: 0 if the layer is right, 1 if it is not, or if something keeps the processes apart.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import socket
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jax_ep._src.core.make_mesh import by_host
from jax_ep.doctor import layer, probes
from jax_ep.doctor.__main__ import LARGEST_ERROR

FACT_BYTES = 4096

Facts = dict[str, Any]


def collect() -> Facts:
    """Collects what this process sees, as JSON values."""
    return {
        "process": jax.process_index(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "boot_id": _read("/proc/sys/kernel/random/boot_id"),
        "network": os.readlink("/proc/self/ns/net"),
        "user": os.geteuid(),
        "version": probes.version("jax-ep"),
        "devices": [str(device) for device in jax.local_devices()],
        "gpus": [gpu["uuid"] for gpu in probes.nvml()["gpus"]],
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES", "all"),
        "mps": _mps(),
    }


def gather(facts: Facts) -> list[Facts]:
    """The facts of all processes, in their order."""
    text = json.dumps(facts).encode()
    if len(text) > FACT_BYTES:
        raise SystemExit(f"the facts of this process take {len(text)} bytes; {FACT_BYTES} fit")
    padded = np.frombuffer(text.ljust(FACT_BYTES), np.uint8)
    rows = multihost_utils.process_allgather(padded).reshape(-1, FACT_BYTES)
    return [json.loads(row.tobytes()) for row in rows]


def problems(processes: Sequence[Facts], platform: str) -> list[str]:
    """Says what keeps the processes apart, and what to do."""
    found = []
    for name, values in _differences(processes, ("version",)):
        found.append(f"the processes have different {name}s of jax_ep: {values}. Install the same.")
    if platform not in ("gpu", "cuda"):
        return found
    for boot_id in sorted({facts["boot_id"] for facts in processes}):
        here = [facts for facts in processes if facts["boot_id"] == boot_id]
        host = here[0]["host"]
        for _, values in _differences(here, ("network",)):
            found.append(
                f"processes of {host} are in different network namespaces: {values}. Start them in "
                "one pod, or with the host's network."
            )
        for _, values in _differences(here, ("user",)):
            found.append(f"processes of {host} are of different users: {values}.")
    return found


def _differences(processes: Sequence[Facts], names: Sequence[str]) -> list[tuple[str, str]]:
    """Those of the names that have different values, with the process of each value."""
    found = []
    for name in names:
        values = {str(facts[name]): facts["process"] for facts in reversed(processes)}
        if len(values) > 1:
            text = ", ".join(f"{value or 'unset'} in process {i}" for value, i in values.items())
            found.append((name, text))
    return found


def _mps() -> str:
    """The folder of the MPS daemon that CUDA finds, or "no"."""
    folder = pathlib.Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    return str(folder) if (folder / "control").exists() else "no"


def _read(path: str) -> str:
    return pathlib.Path(path).read_text().strip()


def join() -> None:
    """Starts `jax.distributed` by the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m jax_ep.doctor.processes", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0")
    parser.add_argument("--processes", type=int, metavar="N", help="their number")
    parser.add_argument("--process", type=int, metavar="I", help="the number of this one, from 0")
    parser.add_argument(
        "--gpus", metavar="I,...", help="of this process, counted on its host; by default --process"
    )
    arguments = parser.parse_args()
    gpus: list[int] | int | None = arguments.process  # one for each process of a plain shell
    if arguments.gpus is not None:
        gpus = [int(index) for index in arguments.gpus.split(",")]
    jax.distributed.initialize(
        arguments.coordinator, arguments.processes, arguments.process, local_device_ids=gpus
    )


def error_of(trial: layer.Layer) -> float | None:
    """Runs the trial on all processes. None for NaN."""
    results = trial.compiled(*trial.arguments)
    return trial.error_of(multihost_utils.process_allgather(results, tiled=True))


def main() -> int:
    """Prints the report in the first process."""
    os.environ.setdefault("JAX_EP_DEBUG", "1")  # each process says what it tries
    join()
    processes = gather(collect())
    found = problems(processes, jax.default_backend())
    lines = [", ".join(f"{name} {value}" for name, value in facts.items()) for facts in processes]
    if not found:
        implementation, reason = layer.choice(jax.default_backend())
        hosts = len(by_host(jax.devices()))
        trial = layer.Layer(jax.devices())
        errors = [error_of(trial)]
        if hosts > 1:
            lines.append(f"{hosts} hosts: experts over {trial.domain_size} devices inside each")
        lines.append(f"a layer over all devices ({implementation}: {reason}): error {errors[0]}")
        if hosts > 1:
            errors.append(error_of(layer.Layer(jax.devices(), over_hosts=True)))
            text = f"xla, NVLink domains of {trial.domain_size}"
            lines.append(f"a layer with experts over all hosts ({text}): error {errors[1]}")
        if any(error is None or error >= LARGEST_ERROR for error in errors):
            found.append("the layer is wrong.")
    if jax.process_index() == 0:
        print("\n".join([*lines, *found]), flush=True)  # noqa: T201
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
