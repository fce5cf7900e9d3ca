"""Times dispatch, redispatch and combine of N GPUs in one process and in N processes, in one command:

    PYTHONPATH=tests/helpers python -P tests/processes/time_layouts.py 4

Layouts take turns. Every process makes the same number of calls, chained as in `python -m jax_ep.bench transfer`, whose
operands these are. Results have the bits of the pure-JAX implementation. Times are medians of process 0 in each turn, in microseconds.
--smoke takes CPU devices and tiny shapes.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import sys
import time

import launcher  # isort: skip

GPU = {
    "JAX_EP_IMPLEMENTATION": "cuda",
    "JAX_PLATFORMS": "cuda,cpu",
    "NCCL_NVLS_ENABLE": "0",  # NVLink multicast is not for test machines that others use
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}
# Processes do not begin a burst at the same time: it has so many programs that this does not count.
BURSTS, PROGRAMS_OF_A_BURST = 30, 16
FEW_TOKENS = 128
TURNS = 2


def child(smoke: bool) -> None:
    """Prints the times of each operation as JSON, in one of the processes."""
    import jax

    from jax_ep.bench.common.benchmark import Case
    from jax_ep.bench.transfer import benchmark as transfer
    from jax_ep.bench.transfer import problem as transfer_problem

    first = transfer.SHAPES[0]
    shapes = (first, dataclasses.replace(first, tokens=FEW_TOKENS))
    if smoke:
        shapes = transfer.SMOKE_SHAPES[:1]
    mesh = transfer_problem.make_mesh(jax.device_count())
    times = {}
    for shape in shapes:
        problem = transfer_problem.make_problem(mesh, shape, "balanced", 0 if smoke else 100e6)
        for operation in ("dispatch", "redispatch", "combine"):
            chained = 2 if smoke else transfer.BENCHMARK.chains(shape)[-1]
            case = Case(operation, shape, "balanced", chained)
            started = transfer.transfer_providers.Ours().start(case, problem)
            times[case.record()["key"]] = burst_times(started, 2 if smoke else BURSTS)
    if jax.process_index() == 0:
        print(json.dumps(times))


def burst_times(started, bursts: int) -> list[float]:
    """Microseconds of an operation, by burst."""
    import jax

    rotation = itertools.cycle(started.arguments)
    found = []
    for _ in range(2 + bursts):  # two warm up
        begin = time.perf_counter()
        for _ in range(PROGRAMS_OF_A_BURST):
            result = started.call(next(rotation))
        jax.block_until_ready(result)
        found.append((time.perf_counter() - begin) / (PROGRAMS_OF_A_BURST * started.repeats) * 1e6)
    return found[2:]


def environment(processes: int, devices: int, smoke: bool) -> dict[str, str]:
    """The variables of a layout."""
    per_process = devices // processes
    if smoke:
        return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(per_process)}
    if processes == 1:
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        visible = given.split(",") if given else [str(i) for i in range(devices)]
        return GPU | {"CUDA_VISIBLE_DEVICES": ",".join(visible[:devices])}
    return GPU | {"JAX_EP_TEST_LOCAL_DEVICES": "{process}"}


def measure(devices: int, smoke: bool) -> dict[str, dict[int, list[float]]]:
    """The medians by operation and number of processes, one for each turn."""
    found: dict[str, dict[int, list[float]]] = {}
    for processes in (1, devices) * TURNS:
        command = [__file__, "--child", *(["--smoke"] if smoke else [])]
        variables = environment(processes, devices, smoke)
        results = launcher.run_well(command, processes=processes, environment=variables)
        lines = [line for line in results[0].output.splitlines() if line.startswith("{")]
        for key, times in json.loads(lines[-1]).items():
            found.setdefault(key, {}).setdefault(processes, []).append(statistics.median(times))
    return found


def main() -> None:
    """Prints a line for each operation."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("devices", type=int, nargs="?", default=2)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments.smoke)
    for key, times in measure(arguments.devices, arguments.smoke).items():
        one, several = times[1], times[arguments.devices]
        text = lambda medians: " ".join(f"{median:.1f}" for median in medians)
        ratio = statistics.fmean(several) / statistics.fmean(one)
        layouts = f"1 x {arguments.devices}: {text(one)}, {arguments.devices} x 1: {text(several)}"
        print(f"{key}, {layouts}, ratio {ratio:.3f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
