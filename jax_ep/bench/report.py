"""What is told of the measurements: figures, JSON, a table and a plot."""

from __future__ import annotations

import importlib.metadata
import json
import pathlib
import platform
from typing import Any

import matplotlib as mpl
import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

import jax_ep
from jax_ep.bench.cases import OPERATIONS, Case, Shape

mpl.use("Agg")
from matplotlib import pyplot as plt

OURS = "jax_ep"
# A result counts only if each of these was measured; where there are two, one of them.
REQUIRED = (
    ("dense",),
    (OURS,),
    ("lax.ragged_dot",),
    ("tokamax mosaic", "tokamax triton"),
    ("torch",),
)
PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "nvidia-cublas",
    "nvidia-cublas-cu12",
    "tokamax",
    "torch",
    "triton",
)
ROUNDED_TO = 64  # rows of a group, for what an uneven case is compared with


def versions() -> dict[str, str | None]:
    """Of everything that decides a time; None for what is not installed."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        OURS: jax_ep.__version__,
    }
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def new_record(case: Case, sizes: np.ndarray) -> dict[str, Any]:
    """The record of a case, without measurements."""
    shape = case.shape
    return {
        "rows": shape.rows,
        "k": shape.k,
        "n": shape.n,
        "groups": shape.groups,
        "distribution": case.distribution,
        "operation": case.operation,
        "group_sizes": sizes.tolist(),
        "flops": shape.flops,
        "measurements": {},
    }


def shape_of(record: dict[str, Any]) -> Shape:
    """The shape of a record."""
    return Shape(record["rows"], record["k"], record["n"], record["groups"])


# ---- figures


def add_figures(results: dict[str, Any]) -> None:
    """Adds what follows from the times to every measurement, and who is missing to `results`.

    A measurement gets

      seconds: the median; the mean of the medians of several rounds.
      tflops: by that.
      jax_ep_speedup: its seconds over those of jax_ep.
      weight_bytes_per_second, of_copy: for shapes of decoding: the weights moved once in that time,
        and that over the bytes a second that a copy reads and writes.
      rounded_up_tflops: for uneven groups: the rate of the balanced case times rows over rows when
        each group is rounded up to 64; None where the balanced case was not measured.
    """
    for record in results["cases"]:
        for measurement in record["measurements"].values():
            if "error" not in measurement:
                medians = [times["median"] for times in measurement["rounds"]]
                measurement["seconds"] = sum(medians) / len(medians)
                measurement["tflops"] = record["flops"] / measurement["seconds"] / 1e12
    for record in results["cases"]:
        ours = record["measurements"].get(OURS, {})
        for name, measurement in record["measurements"].items():
            seconds = measurement.get("seconds")
            if seconds is None:
                continue
            if "seconds" in ours:
                measurement["jax_ep_speedup"] = seconds / ours["seconds"]
            if shape_of(record).is_decode and name != "dense":
                rate = shape_of(record).weight_bytes / seconds
                measurement["weight_bytes_per_second"] = rate
                measurement["of_copy"] = rate / results["copy_bytes_per_second"]
            if record["distribution"] != "balanced" and name != "dense":
                measurement["rounded_up_tflops"] = _rounded_up_tflops(results, record, name)
    results["missing"] = missing(results["cases"])
    results["counts"] = bool(results["cases"]) and not results["missing"] and not results["smoke"]


def _rounded_up_tflops(results: dict[str, Any], record: dict[str, Any], name: str) -> float | None:
    same = ("rows", "k", "n", "groups", "operation")
    for other in results["cases"]:
        if other["distribution"] == "balanced" and all(other[x] == record[x] for x in same):
            balanced = other["measurements"].get(name, {}).get("tflops")
            rounded_up = sum(-(-size // ROUNDED_TO) * ROUNDED_TO for size in record["group_sizes"])
            return None if balanced is None else balanced * record["rows"] / rounded_up
    return None


def missing(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The required contenders without a time, why, and in how many of the cases."""
    counts: dict[tuple[str, str], int] = {}
    for record in records:
        for names in REQUIRED:
            measurements = [record["measurements"].get(name, {}) for name in names]
            if any("rounds" in measurement for measurement in measurements):
                continue
            for name, measurement in zip(names, measurements, strict=True):
                key = name, measurement.get("error", "it was not run")
                counts[key] = counts.get(key, 0) + 1
    return [
        {"contender": name, "reason": reason, "cases": count}
        for (name, reason), count in counts.items()
    ]


def write(results: dict[str, Any], path: pathlib.Path) -> None:
    """Writes the results so far, in one step: a reader never sees half of them."""
    add_figures(results)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(results, indent=1) + "\n")
    temporary.replace(path)


# ---- what people see


def progress_bar(console: Console) -> Progress:
    """A bar with a text field `info` at its end."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[info]}"),
        console=console,
    )


def show(results: dict[str, Any], console: Console) -> None:
    """Prints a table for each operation, what is special to some cases, and who is missing."""
    for operation in OPERATIONS:
        records = [record for record in results["cases"] if record["operation"] == operation]
        if records:
            console.print(_operation_table(records, f"{operation} on {results['device']}"))
    special = _special_table(results)
    if special.row_count:
        console.print(special)
    for gap in results["missing"]:
        console.print(
            f"missing in {gap['cases']} of {len(results['cases'])} cases: {gap['contender']}: "
            f"{gap['reason']}",
            style="yellow",
            markup=False,
        )
    if not results["counts"]:
        console.print(
            "This is not a result: " + ("a smoke test." if results["smoke"] else "see above.")
        )


def _operation_table(records: list[dict[str, Any]], title: str) -> Table:
    names = list(dict.fromkeys(name for record in records for name in record["measurements"]))
    table = Table(title=f"{title}: TFLOP/s, and how many times as fast jax_ep is")
    table.add_column("rows, K -> N, groups")
    for name in names:
        table.add_column(name, justify="right")
    for record in records:
        cells = []
        for name in names:
            measurement = record["measurements"].get(name, {})
            speedup = measurement.get("jax_ep_speedup")
            times = f"  {speedup:.2f}x" if speedup and name != OURS else ""
            cells.append(
                f"{measurement['tflops']:.3g}{times}"
                if "tflops" in measurement
                else "error"
                if measurement
                else ""
            )
        table.add_row(f"{shape_of(record)}, {record['distribution']}", *cells)
    return table


def _special_table(results: dict[str, Any]) -> Table:
    copy = results["copy_bytes_per_second"] / 1e12
    table = Table(
        title=f"jax_ep, uneven groups and decoding; a copy moves {copy:.3g} TB/s",
        caption=f"* times rows over rows with each group rounded up to {ROUNDED_TO}",
    )
    for heading in ("case", "operation", "TFLOP/s", "balanced*", "weights, TB/s", "of a copy"):
        table.add_column(heading)
    for record in results["cases"]:
        ours = record["measurements"].get(OURS, {})
        rounded_up, rate = ours.get("rounded_up_tflops"), ours.get("weight_bytes_per_second")
        if rounded_up is None and rate is None:
            continue
        table.add_row(
            f"{shape_of(record)}, {record['distribution']}",
            record["operation"],
            f"{ours['tflops']:.3g}",
            "" if rounded_up is None else f"{rounded_up:.3g}",
            "" if rate is None else f"{rate / 1e12:.3g}",
            "" if rate is None else f"{ours['of_copy']:.2f}",
        )
    return table


def plot(results: dict[str, Any], path: pathlib.Path) -> None:
    """Writes bars of TFLOP/s: one panel for each operation, one group of bars for each case."""
    names = list(dict.fromkeys(n for record in results["cases"] for n in record["measurements"]))
    operations = [o for o in OPERATIONS if any(r["operation"] == o for r in results["cases"])]
    figure, panels = plt.subplots(
        len(operations), 1, figsize=(12, 3.5 * len(operations)), squeeze=False, layout="constrained"
    )
    for panel, operation in zip(panels[:, 0], operations, strict=True):
        records = [record for record in results["cases"] if record["operation"] == operation]
        width = 0.8 / len(names)
        for index, name in enumerate(names):
            heights = [r["measurements"].get(name, {}).get("tflops", 0.0) for r in records]
            places = np.arange(len(records)) + (index - (len(names) - 1) / 2) * width
            panel.bar(places, heights, width, label=name)
        labels = [
            f"{r['rows']}\n{r['k']}→{r['n']}, {r['groups']}\n{r['distribution']}" for r in records
        ]
        panel.set_xticks(range(len(records)), labels, fontsize=8)
        panel.set(ylabel="TFLOP/s", title=operation.replace("_", " "))
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    figure.suptitle(f"bfloat16 matmuls on {results['device']}")
    figure.savefig(path, dpi=120)
    plt.close(figure)
