"""The doctor's trial: one small layer on all local devices, in a process of its own.

Prints one JSON object a line; the last line of a process that hangs or crashes says how far it got.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

# -P: the installed package, also from a checkout
COMMAND = (sys.executable, "-P", "-m", "jax_ep.doctor.layer")
DEADLINE_SECONDS = 20
START_SECONDS = 180  # for JAX to start and to compile


def run(
    command: Sequence[str] = COMMAND,
    deadline: float = DEADLINE_SECONDS,
    start: float = START_SECONDS,
) -> dict[str, Any]:
    """The trial's findings, with "stage": "done", or how far it got and how it ended.

    From the first launch on it has `deadline` seconds; all of it has `start` seconds more.
    """
    environment = {
        "JAX_EP_ENTRY_TIMEOUT_S": str(deadline / 2),
        "JAX_EP_PROGRESS_TIMEOUT_S": str(deadline / 2),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    with subprocess.Popen(
        [*command, str(deadline)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=start + deadline)
            ended = _how_it_ended(process.returncode)
        except subprocess.TimeoutExpired:
            process.kill()  # it may hold on to SIGTERM
            output, errors = process.communicate()
            ended = "it was killed, because it did not end"
    found: dict[str, Any] = {"stage": "start"}
    for line in output.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    if found["stage"] != "done":
        found["timed_out"] = "Timeout (" in errors or ended.startswith("it was killed")
        found["ended"] = ended
        found["stderr"] = errors[-4000:]
    return found


def _how_it_ended(status: int) -> str:
    if status < 0:
        return f"it was ended by {signal.Signals(-status).name}"
    return f"it ended with status {status}"


# ---- in the process


def main(deadline: float = DEADLINE_SECONDS) -> None:
    """Goes through the stages."""
    import jax

    from jax_ep.doctor import probes

    say(stage="import")
    say(
        stage="devices",
        platform=jax.default_backend(),
        devices=[str(device) for device in jax.local_devices()],
    )
    implementation, reason = choice(jax.default_backend())
    say(stage="compile", implementation=implementation, reason=reason, probes=device_probes())
    layer = Layer()
    say(stage="run")
    faulthandler.dump_traceback_later(deadline, exit=True)
    error = layer.largest_error()
    faulthandler.cancel_dump_traceback_later()
    libraries = probes.linked_libraries(pathlib.Path("/proc/self/maps").read_text())
    say(stage="done", largest_error=error, libraries=libraries)


def say(**facts: Any) -> None:
    """One line, at once: the next step may be the last."""
    print(json.dumps(facts), flush=True)  # noqa: T201


def device_probes() -> list[dict[str, Any]]:
    """For every GPU, the code of this build that it runs, or why it runs none."""
    from jax_ep import _ffi

    return _ffi.probe_devices()


def choice(backend: str) -> tuple[str, str]:
    """The implementation that runs here, and why."""
    from jax_ep._src.core import checks, runtime

    chosen = checks.implementation("doctor", None)
    if chosen is not None:
        return chosen, f"JAX_EP_IMPLEMENTATION={chosen}"
    if backend not in ("gpu", "cuda"):
        return "xla", f"the platform is {backend}"
    if not runtime.has_cuda():
        return "xla", "this build of jax_ep has no CUDA kernels"
    return "cuda", "the platform is CUDA"


class Layer:
    """dispatch, grouped_matmul and combine over these devices (all local ones), compiled.

    Each host has all experts, or with `over_hosts` all hosts together, each as an NVLink domain.
    """

    def __init__(self, devices: Sequence[Any] | None = None, *, over_hosts: bool = False) -> None:
        import jax
        import numpy as np
        from jax.sharding import AxisType, PartitionSpec

        import jax_ep
        from jax_ep._src.core.make_mesh import by_host
        from jax_ep._src.core.runtime import NETWORK_PROBLEM

        devices = devices or jax.local_devices()
        self.domain_size = math.gcd(*map(len, by_host(devices)))
        ranks, hidden, top_k = len(devices) if over_hosts else self.domain_size, 16, 2
        implementation = "xla" if over_hosts and NETWORK_PROBLEM else None
        tokens, experts = 8 * len(devices), 2 * ranks
        rng = np.random.default_rng(0)
        self.x = rng.normal(size=(tokens, hidden)).astype(np.float32)
        self.ids = rng.integers(0, experts, (tokens, top_k)).astype(np.int32)
        self.weights = rng.random((tokens, top_k)).astype(np.float32)
        self.matrices = rng.normal(size=(experts, hidden, hidden)).astype(np.float32)

        def layer(
            x: jax.Array, ids: jax.Array, weights: jax.Array, matrices: jax.Array
        ) -> jax.Array:
            sent = jax_ep.dispatch(
                x,
                ids,
                weights,
                num_experts=experts,
                axis_name="expert",
                nvlink_domain_size=self.domain_size if over_hosts else None,
                implementation=implementation,
            )
            y = jax_ep.grouped_matmul(sent.rows, matrices, sent.group_sizes)
            return jax_ep.combine(y, sent.plan, sent.row_weights, implementation=implementation)

        shape, names, auto = (len(devices) // ranks, ranks), ("data", "expert"), AxisType.Auto
        self.mesh = jax_ep.make_mesh(shape, names, axis_types=(auto, auto), devices=devices)
        split = PartitionSpec(names)
        specs = (split, split, split, PartitionSpec("expert"))
        mapped = jax.shard_map(layer, mesh=self.mesh, in_specs=specs, out_specs=split)
        arrays = (self.x, self.ids, self.weights, self.matrices)
        self.arguments = [
            jax.device_put(array, jax.NamedSharding(self.mesh, spec))
            for array, spec in zip(arrays, specs, strict=True)
        ]
        self.compiled = jax.jit(mapped).lower(*self.arguments).compile()

    def largest_error(self) -> float | None:
        """The error of one call."""
        import numpy as np

        return self.error_of(np.asarray(self.compiled(*self.arguments)))

    def error_of(self, y: Any) -> float | None:
        """Against every expert applied to every token, relative to the largest; None for NaN."""
        import numpy as np

        every = np.einsum("ti,tkij->tkj", self.x, self.matrices[self.ids])
        expected = np.einsum("tk,tkj->tj", self.weights, every)
        error = float(np.abs(y - expected).max() / np.abs(expected).max())
        return error if np.isfinite(error) else None


if __name__ == "__main__":
    main(*map(float, sys.argv[1:2]))
