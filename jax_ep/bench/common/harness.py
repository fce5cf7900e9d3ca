"""The harness of all benchmarks: options, interleaved rounds, and a report.

DIR/NAME.json is written after some measurements, so that a run that is stopped leaves what it had:

  benchmark, started, command, smoke, device, num_devices, versions, timing: how it was measured
  cases: each with key "operation/shape/variant", operation, sizes, and measurements by provider:
    {"facts", "rounds": [timing.Times], "seconds", "jax_ep_speedup", the figures} or {"error"};
    with --energy also "energy" (energy.Energy), or "energy_error";
    and wall_seconds, what its stages took (the first of several with one shape counts for all)
  idle_watts: of a board that rests, with --energy
  missing: the required providers without a time, why, and in how many cases
  not_run: the other providers that ended with an error, likewise
  counts: whether this is a result: no required provider is missing, and it is no smoke test
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import functools
import itertools
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
from rich.console import Console

from jax_ep.bench.common import comparison, energy, report, timing
from jax_ep.bench.common.benchmark import Benchmark, Case, Provider
from jax_ep.bench.common.comparison import Comparison, WallSeconds, start_early
from jax_ep.bench.common.report import OURS

SMOKE_ITERATIONS = 2
WRITING_SECONDS = 2  # between two writings of the results, while which a GPU would rest
ROTATED_BYTES = 100e6  # the operands of successive calls span this: twice the 50 MB L2 of an H100


# ---- options


def parse_positive(text: str) -> int:
    """Returns the number; an argparse error if it is none, or less than 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def parse_shape(shape_type: Any, text: str) -> Any:
    """Returns the shape written as its sizes, such as "8192,7168,4096,64", or an argparse error."""
    names = [field.name.upper() for field in dataclasses.fields(shape_type)]
    parts = text.split(",")
    if len(parts) != len(names) or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a shape; expected positive numbers {','.join(names)}"
        )
    return shape_type(*map(int, parts))


def add_arguments(parser: argparse.ArgumentParser, benchmark: Benchmark) -> None:
    """Adds the options of a benchmark, and those of all."""
    benchmark.add_arguments(parser)
    sizes = ",".join(field.name.upper() for field in dataclasses.fields(benchmark.shape_type))
    parse = functools.partial(parse_shape, benchmark.shape_type)
    parser.add_argument(
        "--shape", type=parse, action="append", metavar=sizes, help="may be repeated"
    )
    default = benchmark.variants[0]
    variants = f"may be repeated (default: {default}, and all for the first shape)"
    parser.add_argument(
        f"--{benchmark.variant_option}",
        dest="variant",
        choices=benchmark.variants,
        action="append",
        help=variants,
    )
    names = list(dict.fromkeys(provider.name for provider in benchmark.providers))
    for option, choices in (("--operation", benchmark.operations), ("--provider", names)):
        parser.add_argument(option, choices=choices, action="append", help="may be repeated")
    iterations = "of at least 10 ms each (default: %(default)s; fewer for calls of more than 50 ms)"
    parser.add_argument(
        "--iterations", type=parse_positive, default=benchmark.iterations, help=iterations
    )
    if benchmark.has_energy:
        joules = (
            f"also joules and watts, running each provider {energy.PHASES} times for so long; "
            "10 or more for a result. Of the GPU boards alone (NVML); needs nvidia-ml-py"
        )
        parser.add_argument("--energy", type=parse_positive, metavar="SECONDS", help=joules)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench"), metavar="DIR")
    require_all = "exit with status 1 if a provider is missing"
    parser.add_argument("--require-all", action="store_true", help=require_all)
    smoke = "tiny shapes and 2 iterations, on a CPU too: shows that it works, measures nothing"
    parser.add_argument("--smoke", action="store_true", help=smoke)


# ---- a run


def run(benchmark: Benchmark, arguments: argparse.Namespace) -> int:
    """Measures, and writes and prints the report.

    Returns:
      The exit status: 0, 1 if --require-all was given and a provider is missing, 2 without a GPU.
    """
    console = Console(width=None if sys.stdout.isatty() else 140)  # the width of a log
    platform = jax.default_backend()
    if platform != "gpu" and not arguments.smoke:
        console.print(
            f"There is no GPU to measure: JAX runs on {platform}. See `python -m jax_ep.doctor`; "
            "--smoke tries the program itself on this machine.",
            style="red",
        )
        return 2
    results: dict[str, Any] = {
        "benchmark": benchmark.name,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv[1:],
        "smoke": arguments.smoke,
        "device": jax.devices()[0].device_kind,
        "num_devices": jax.device_count(),
        "versions": report.versions(),
        "timing": " ".join((timing.device_times.__doc__ or "").split("Args:")[0].split()),
        "cases": [],
    }
    arguments.shape = list(arguments.shape or benchmark.default_shapes(arguments))
    benchmark.prepare(arguments, results)
    boards = None
    if getattr(arguments, "energy", None):
        try:
            boards = energy.Boards(results["num_devices"])
        except Exception as error:  # noqa: BLE001  NVML has many
            console.print(
                f"--energy: the energy counters cannot be read ({error}); expected the package "
                "nvidia-ml-py and a GPU. Install it with `pip install jax_ep[bench]`.",
                style="red",
                markup=False,
            )
            return 2
        results["idle_watts"] = boards.idle_watts()
    cases = chosen_cases(benchmark, arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{benchmark.name}.json"
    total = sum(len(schedule(benchmark, arguments, case)) for case in cases)
    start = written = time.perf_counter()
    with report.progress_bar(console) as progress:
        task = progress.add_task("measuring", total=total, info="")
        for info in _measure_all(benchmark, cases, arguments, results, boards, console):
            progress.update(task, advance=1, info=info)
            if time.perf_counter() - written > WRITING_SECONDS:
                summarize(benchmark, results)
                report.write(results, path)
                written = time.perf_counter()
    summarize(benchmark, results)
    report.write(results, path)
    benchmark.plot(results, path.with_suffix(".png"))
    report.show(results, benchmark.figures, console)
    console.print(f"{path} and {path.stem}.png are written.")
    stages = comparison.total(results["cases"])
    console.print(f"{time.perf_counter() - start:.1f} s on the clock: {stages}", highlight=False)
    return 1 if arguments.require_all and results["missing"] else 0


def chosen_cases(benchmark: Benchmark, arguments: argparse.Namespace) -> list[Case]:
    """Returns all combinations; by default the other variants for the first shape alone."""
    supported = {o for p in benchmark.chosen_providers(arguments) for o in p.operations}
    asked = arguments.operation or benchmark.default_operations or benchmark.operations
    operations = [o for o in asked if o in supported]
    if not operations:
        sys.exit(
            f"{', '.join(arguments.provider)} cannot {' or '.join(asked)}; "
            f"expected a provider that can. Give --provider {OURS}, or another --operation."
        )
    return [
        Case(operation, shape, variant, chained)
        for shape in arguments.shape
        for variant in arguments.variant or benchmark.variants
        if arguments.variant or variant == benchmark.variants[0] or shape == arguments.shape[0]
        for operation in operations
        for chained in benchmark.chains(shape)
    ]


def schedule(benchmark: Benchmark, arguments: argparse.Namespace, case: Case) -> list[Provider]:
    """Returns the measurements of a case, in their order."""
    chosen = [p for p in benchmark.chosen_providers(arguments) if case.operation in p.operations]
    return benchmark.order([p for p in chosen if benchmark.applies(p, case)])


def _measure_all(
    benchmark: Benchmark,
    cases: list[Case],
    arguments: argparse.Namespace,
    results: dict[str, Any],
    boards: energy.Boards | None,
    console: Console,
) -> Iterator[str]:
    """Adds a record for each case, and yields after each measurement."""
    iterations = SMOKE_ITERATIONS if arguments.smoke else arguments.iterations
    rotated_bytes = 0 if arguments.smoke else ROTATED_BYTES
    for (shape, variant), alike in itertools.groupby(
        cases, lambda case: (case.shape, case.variant)
    ):
        group = list(alike)
        wall = WallSeconds()
        with wall.stage("operands"):
            problem = benchmark.make_problem(shape, variant, rotated_bytes)
        facts = getattr(problem, "facts", {})
        records = [case.record() | facts | {"measurements": {}} for case in group]
        compared = []
        for case, record in zip(group, records, strict=True):
            each = Comparison(benchmark, case, problem, iterations, record["measurements"], wall)
            record["wall_seconds"] = wall
            compared.append(each)
            wall = WallSeconds()
        with compared[0].wall.stage("programs"):
            start_early(
                [
                    (each, provider)
                    for each in compared
                    for provider in dict.fromkeys(schedule(benchmark, arguments, each.case))
                    if benchmark.starts_early(provider)
                ]
            )
        for each, record in zip(compared, records, strict=True):
            results["cases"].append(record)
            for provider in schedule(benchmark, arguments, each.case):
                each.measure(provider)
                yield f"{record['key']}, {provider.name}"
            if boards is not None:
                each.measure_energy(boards, arguments.energy)
            benchmark.finish(each.case, each.started)
        stages = comparison.total(records)
        console.print(f"{shape}, {variant}: {stages}", highlight=False)
        del problem, compared, each  # before the next are made: these are gigabytes


# ---- figures


def summarize(benchmark: Benchmark, results: dict[str, Any]) -> None:
    """Adds what follows from the rounds to every measurement, and what has no time to `results`.

    seconds: the mean of the rounds' averages, without the first of several, before which the device
      may have been idle. jax_ep_speedup: these over jax_ep's, or, with as many rounds, the median
      of the ratios of the rounds.
    """

    def rounds_of(measurement: dict[str, Any]) -> list[float]:
        return [times[benchmark.average] for times in measurement["rounds"]]

    for record in results["cases"]:
        measured = {n: m for n, m in record["measurements"].items() if "rounds" in m}
        for measurement in measured.values():
            measurement["seconds"] = statistics.fmean(report.counted(rounds_of(measurement)))
            taken = measurement.get("energy", {})
            measurement |= {name: taken[name] for name in ("joules", "watts") if taken}
        for measurement in measured.values() if OURS in measured else ():
            ours = measured[OURS]
            measurement["jax_ep_speedup"] = (
                report.ratio(rounds_of(measurement), rounds_of(ours))
                if len(measurement["rounds"]) == len(ours["rounds"])
                else measurement["seconds"] / ours["seconds"]
            )
    benchmark.add_figures(results)
    gaps: collections.Counter[tuple[str, str]] = collections.Counter()
    for record in results["cases"]:
        for names in benchmark.required(record):
            measurements = [record["measurements"].get(name, {}) for name in names]
            if not any("rounds" in measurement for measurement in measurements):
                for name, measurement in zip(names, measurements, strict=True):
                    gaps[name, measurement.get("error", "it was not run")] += 1
    errors: collections.Counter[tuple[str, str]] = collections.Counter()
    for record in results["cases"]:
        for name, measurement in record["measurements"].items():
            if "error" in measurement and (name, measurement["error"]) not in gaps:
                errors[name, measurement["error"]] += 1
    for key, counted in ("missing", gaps), ("not_run", errors):
        results[key] = [
            {"provider": name, "reason": reason, "cases": count}
            for (name, reason), count in counted.items()
        ]
    results["counts"] = bool(results["cases"]) and not gaps and not results["smoke"]
