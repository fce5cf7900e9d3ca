"""Runs a Python file in several processes that `jax.distributed` makes one program, on CPU devices or on GPUs.

The file imports this module before anything that starts a JAX backend: in a process that `run` has started, the import joins
the others. A process under `jax.distributed` survives SIGTERM, so
all of them are ended by SIGKILL.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

COORDINATOR = "JAX_EP_TEST_COORDINATOR"
PROCESS = "JAX_EP_TEST_PROCESS"
PROCESSES = "JAX_EP_TEST_PROCESSES"

# Several processes on one GPU: NCCL takes each for a host of its own, or it would refuse the second one. NVLink multicast is
# not for test machines that others use. Waits are sliced in time, so deadlines are long.
SHARED_GPU = {
    "JAX_PLATFORMS": "cuda,cpu",
    "JAX_EP_IMPLEMENTATION": "cuda",
    "JAX_EP_TEST_LOCAL_DEVICES": "0",
    "JAX_EP_ENTRY_TIMEOUT_S": "120",
    "JAX_EP_PROGRESS_TIMEOUT_S": "120",
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",  # the parent may be of the CPU tier
    "NCCL_HOSTID": "shared-gpu-{process}",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.15",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}


@dataclasses.dataclass(frozen=True)
class Result:
    """The end of a process: its status, negative after a signal, and its output with stderr."""

    status: int
    output: str


def _join() -> None:
    if (count := int(os.environ.get(PROCESSES, "0"))) < 2:
        return
    import jax

    jax.distributed.initialize(
        os.environ[COORDINATOR],
        count,
        int(os.environ[PROCESS]),
        local_device_ids=local_device_ids(),
    )


def local_device_ids() -> list[int] | None:
    """The GPUs of this process, or None for all that it sees."""
    local = os.environ.get("JAX_EP_TEST_LOCAL_DEVICES")
    return None if local is None else [int(id) for id in local.split(",")]


def free_port() -> int:
    """Returns a port of this machine that nobody uses."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run(
    command: Sequence[str],
    *,
    processes: int,
    environment: dict[str, str] | None = None,
    timeout: float = 300,
    grace: float = 60,
    watch: Callable[[list[subprocess.Popen[bytes]]], None] = lambda _: None,
) -> list[Result]:
    """Runs `python COMMAND...` in each process. "{process}" in a variable is the process's number.

    Args:
      timeout: seconds for all.
      grace: seconds for the others after one has failed.
      watch: called again and again with all processes while some run; it may kill one.

    Raises:
      AssertionError: not all have ended in time; all are killed, and the message has the output of each.
    """
    coordinator = f"127.0.0.1:{free_port()}"
    files, started = [], []
    for process in range(processes):
        changed = {
            COORDINATOR: coordinator,
            PROCESS: str(process),
            PROCESSES: str(processes),
        } | {k: v.format(process=process) for k, v in (environment or {}).items()}
        files.append(tempfile.TemporaryFile())  # noqa: SIM115  closed by _results
        started.append(
            subprocess.Popen(
                [sys.executable, *command],
                env=os.environ | changed,
                stdout=files[-1],
                stderr=subprocess.STDOUT,
            )
        )
    deadline = time.monotonic() + timeout
    try:
        while any(process.poll() is None for process in started):
            watch(started)
            if any(process.poll() for process in started):
                deadline, grace = min(deadline, time.monotonic() + grace), timeout
            if time.monotonic() > deadline:
                running = [i for i, process in enumerate(started) if process.poll() is None]
                _kill(started)
                raise AssertionError(
                    f"processes {running} have not ended in time\n{describe(_results(started, files))}"
                )
            time.sleep(0.02)
    finally:
        _kill(started)
    return _results(started, files)


def run_well(command: Sequence[str], **options) -> list[Result]:
    """Runs as `run`, and raises an AssertionError with all output unless all processes end with status 0."""
    results = run(command, **options)
    if any(result.status for result in results):
        raise AssertionError(describe(results))
    return results


def describe(results: Sequence[Result]) -> str:
    """Returns the end of each process and of its output."""
    return "\n".join(
        f"---- process {i}, status {result.status}\n{result.output[-6000:]}"
        for i, result in enumerate(results)
    )


def _kill(started) -> None:
    for process in started:
        process.kill()
        process.wait()


def _results(started, files) -> list[Result]:
    results = []
    for process, file in zip(started, files, strict=True):
        file.seek(0)
        results.append(Result(process.returncode, file.read().decode(errors="replace")))
        file.close()
    return results


_join()
