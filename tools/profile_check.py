"""Checks a profile on this machine's GPUs, and what recording costs.

  JAX_EP_CUDA=ON make wheel && cp dist/jax_ep-*.whl normal.whl
  JAX_EP_CUDA=ON JAX_EP_PROFILE=ON make wheel && cp dist/jax_ep-*.whl profiled.whl
  python -P tools/profile_check.py normal.whl profiled.whl --out FOLDER

Processes of both builds alternate. Each times a dispatch, a combine and a grouped matmul in chains,
and those of the profiled build also while they record. Traces, pictures and times go to the folder.
Fails if a trace is wrong, or if recording costs 3 % or more. --few has fewer tokens, for the
low-latency kernels.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from typing import Any

MAX_COST = 1.03
CALLS = 20  # per chain
REPEATS = 5  # chains per process
AXIS = "expert"


def main() -> int:
    """Returns 1 if something is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("normal", type=pathlib.Path)
    parser.add_argument("profiled", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--few", action="store_true")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.measure:
        times = measure(options.out, 64 if options.few else 4096)
        (options.out / "times.json").write_text(json.dumps(times))
        return 0
    return compare(options)


# ---- one process: times of one build


def measure(out: pathlib.Path, num_tokens: int) -> dict[str, dict[str, list[float]]]:
    """Returns the microseconds per call by build and operation. Writes a profile of each."""
    import jax

    import jax_ep

    profiled = jax_ep.build_info()["profile"]
    times: dict[str, dict[str, list[float]]] = collections.defaultdict(dict)
    for name, (kernels, run) in operations(num_tokens).items():
        jax.block_until_ready(run())

        def timed(run: Callable[[], Any] = run) -> float:
            start = time.perf_counter()
            jax.block_until_ready(run())
            return (time.perf_counter() - start) / CALLS * 1e6

        if not profiled:
            times["normal"][name] = [timed() for _ in range(REPEATS)]
            continue
        idle, recording = [], []
        folder = out / name.replace(" ", "_")
        for _ in range(REPEATS):
            idle.append(timed())
            with jax_ep.profile(folder, max_records=2**23) as profile:
                recording.append(timed())
        times["idle"][name], times["recording"][name] = idle, recording
        check_trace(profile.trace, kernels, statistics.median(recording))
        print(profile.summary(), flush=True)
        if importlib.util.find_spec("matplotlib"):
            print(profile.picture, flush=True)
    return times


def operations(num_tokens: int) -> dict[str, tuple[tuple[str, ...], Callable[[], Any]]]:
    """Chains of CALLS calls, and the kernels that each may launch."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType
    from jax.sharding import PartitionSpec as P

    import jax_ep
    from jax_ep._src.core.chain import chain

    ranks, hidden, top_k = jax.device_count(), 7168, 8
    num_experts = 32 * ranks
    mesh = jax_ep.make_mesh((ranks,), (AXIS,), axis_types=(AxisType.Auto,))
    keys = iter(jax.random.split(jax.random.key(0), 8))
    x = jax.random.normal(next(keys), (ranks * num_tokens, hidden), jnp.bfloat16)
    ids = jax.random.randint(next(keys), (ranks * num_tokens, top_k), 0, num_experts, jnp.int32)
    weights = jax.random.uniform(next(keys), ids.shape)

    def sharded(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
        on_ranks = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)))
        return lambda: on_ranks(*arguments)

    def send(x: Any, ids: Any, weights: Any) -> Any:
        return jax_ep.dispatch(x, ids, weights, num_experts=num_experts, axis_name=AXIS)

    def dispatches(x: Any, ids: Any, weights: Any) -> Any:
        return chain(lambda x: send(x, ids, weights).rows, CALLS)(x)

    def combines(x: Any, ids: Any, weights: Any) -> Any:
        sent = send(x, ids, weights)
        # The plan's dispatch is one call of CALLS + 1.
        return chain(lambda y: jax_ep.combine(y, sent.plan, sent.row_weights), CALLS)(sent.rows)

    def matmuls(rows: Any, matrices: Any, sizes: Any) -> Any:
        return chain(lambda rows: jax_ep.grouped_matmul(rows, matrices, sizes), CALLS)(rows)

    groups, rows, contracted, columns = 32, 8 * num_tokens, 2048, 1536
    lhs = jax.random.normal(next(keys), (ranks * rows, contracted), jnp.bfloat16)
    rhs = jax.random.normal(next(keys), (ranks * groups, contracted, columns), jnp.bfloat16)
    sizes = jnp.full(ranks * groups, rows // groups, jnp.int32)
    return {
        "dispatch": (
            ("DispatchKernel", "LowLatencyDispatchKernel"),
            sharded(dispatches, x, ids, weights),
        ),
        "combine": (
            ("CombineKernel", "LowLatencyCombineKernel"),
            sharded(combines, x, ids, weights),
        ),
        "grouped matmul": (("GroupedMatmulSwappedKernel",), sharded(matmuls, lhs, rhs, sizes)),
    }


def check_trace(path: pathlib.Path, kernels: tuple[str, ...], microseconds: float) -> None:
    """Fails unless every block of every launch is there, and spans are inside their kernels."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    launches: dict[tuple[int, int], list[dict[str, Any]]] = collections.defaultdict(list)
    rows: dict[tuple[int, int], list[dict[str, Any]]] = collections.defaultdict(list)
    for event in slices:
        rows[event["pid"], event["tid"]].append(event)
        if event["cat"] == "kernel" and event["name"] in kernels:
            launches[event["pid"], event["args"]["launch"]].append(event)
    gpus = {gpu for gpu, _ in launches}
    assert gpus and len(launches) == CALLS * len(gpus), (len(launches), gpus)
    durations = []
    for blocks in launches.values():
        found = sorted({event["args"]["block"] for event in blocks})
        assert found == list(range(blocks[0]["args"]["blocks"])), found
        ends = [event["ts"] + event["dur"] for event in blocks]
        durations.append(max(ends) - min(event["ts"] for event in blocks))
    mean = statistics.mean(durations)
    print(f"{kernels[0]}: {mean:.1f} us in the trace, {microseconds:.1f} us per call", flush=True)
    assert 0.5 * microseconds < mean < 1.1 * microseconds, (mean, microseconds)
    for row in rows.values():
        open_until: list[float] = []
        for event in sorted(row, key=lambda event: (event["ts"], -event["dur"])):
            end = event["ts"] + event["dur"]
            while open_until and open_until[-1] <= event["ts"] + 1e-6:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-6, event
            assert (event["cat"] == "kernel") == (not open_until), event
            open_until.append(end)


# ---- all processes


def compare(options: argparse.Namespace) -> int:
    """Runs processes of both builds, interleaved. Returns 1 if recording costs too much."""
    times: dict[str, dict[str, list[float]]] = collections.defaultdict(
        lambda: collections.defaultdict(list)
    )
    with tempfile.TemporaryDirectory() as folder:
        builds = {}
        for name in ("normal", "profiled"):
            builds[name] = pathlib.Path(folder) / name
            with zipfile.ZipFile(getattr(options, name)) as wheel:
                wheel.extractall(builds[name])
        for turn in range(options.rounds):
            for build in sorted(builds, reverse=turn % 2 == 1):
                out = options.out / build
                command = [sys.executable, "-P", __file__, "-", "-", "--measure", "--out", out]
                environment = os.environ | {"PYTHONPATH": str(builds[build])}
                few = ["--few"] if options.few else []
                subprocess.run([*command, *few], env=environment, check=True)
                for kind, by_name in json.loads((out / "times.json").read_text()).items():
                    for name, microseconds in by_name.items():
                        times[kind][name] += microseconds
    (options.out / "times.json").write_text(json.dumps(times, indent=1))
    costs = []
    for name in times["normal"]:
        normal, idle, recording = (
            statistics.median(times[kind][name]) for kind in ("normal", "idle", "recording")
        )
        costs.append(recording / normal)
        print(
            f"{name:16} {normal:8.2f} us, built to record {idle / normal:.4f}, "
            f"recording {recording / normal:.4f}"
        )
    if max(costs) < MAX_COST:
        return 0
    print(f"FAIL: recording costs {max(costs) - 1:.1%}; expected less than {MAX_COST - 1:.0%}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
