"""What is told of matmuls: figures, tables and a plot."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from rich.console import Console
from rich.table import Table

from jax_ep.bench import report
from jax_ep.bench.cases import Case, case_of
from jax_ep.bench.report import OURS, Record

REQUIRED: report.Required = (
    ("dense",),
    (OURS,),
    ("lax.ragged_dot",),
    ("tokamax mosaic", "tokamax triton"),
    ("torch",),
)
ROUNDED_TO = 64  # rows of a group, for what an uneven case is compared with


def new_record(case: Case, sizes: np.ndarray) -> Record:
    """The record of a case, without measurements."""
    return dataclasses.asdict(case.shape) | {
        "distribution": case.distribution,
        "operation": case.operation,
        "group_sizes": sizes.tolist(),
        "flops": case.shape.flops,
        "measurements": {},
    }


# ---- figures


def add_figures(results: dict[str, Any]) -> None:
    """Adds what follows from the times to every measurement, and who is missing to `results`.

    A measurement gets

      seconds, jax_ep_speedup: see `report.add_seconds`.
      tflops: by these seconds.
      weight_bytes_per_second, of_copy: for shapes of decoding: the weights moved once in that time,
        and that over the bytes a second that a copy reads and writes.
      rounded_up_tflops: for uneven groups: the rate of the balanced case times rows over rows when
        each group is rounded up to 64; None where the balanced case was not measured.
    """
    # The power limit is kept on average, so the mean is what a call takes, not the median.
    report.add_seconds(results["cases"], "mean")
    for record in results["cases"]:
        for measurement in record["measurements"].values():
            if "seconds" in measurement:
                measurement["tflops"] = record["flops"] / measurement["seconds"] / 1e12
    for record in results["cases"]:
        case = case_of(record)
        for name, measurement in record["measurements"].items():
            if "seconds" not in measurement or name == "dense":
                continue
            if case.shape.is_decode:
                rate = case.shape.weight_bytes / measurement["seconds"]
                measurement["weight_bytes_per_second"] = rate
                measurement["of_copy"] = rate / results["copy_bytes_per_second"]
            if case.distribution != "balanced":
                measurement["rounded_up_tflops"] = _rounded_up_tflops(results, record, name)
    report.add_missing(results, lambda record: REQUIRED)


def _rounded_up_tflops(results: dict[str, Any], record: Record, name: str) -> float | None:
    balanced = case_of(record)._replace(distribution="balanced")
    for other in results["cases"]:
        tflops = other["measurements"].get(name, {}).get("tflops")
        if case_of(other) == balanced and tflops is not None:
            rounded_up = sum(-(-size // ROUNDED_TO) * ROUNDED_TO for size in record["group_sizes"])
            return tflops * record["rows"] / rounded_up
    return None


# ---- what people see


def show(results: dict[str, Any], console: Console) -> None:
    """Prints a table for each operation, what is special to some cases, and who is missing."""
    for operation, records in report.by_operation(results["cases"]).items():
        console.print(_operation_table(records, f"{operation} on {results['device']}"))
    special = _special_table(results)
    if special.row_count:
        console.print(special)
    report.show_missing(results, console)


def _operation_table(records: list[Record], title: str) -> Table:
    names = report.contender_names(records)
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
        table.add_row(str(case_of(record)), *cells)
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
            str(case_of(record)),
            record["operation"],
            f"{ours['tflops']:.3g}",
            "" if rounded_up is None else f"{rounded_up:.3g}",
            "" if rate is None else f"{rate / 1e12:.3g}",
            "" if rate is None else f"{ours['of_copy']:.2f}",
        )
    return table


def plot(results: dict[str, Any], path: pathlib.Path) -> None:
    """Writes bars of TFLOP/s: one panel for each operation, one group of bars for each case."""
    names = report.contender_names(results["cases"])
    operations = report.by_operation(results["cases"])
    figure, panels = plt.subplots(
        len(operations), 1, figsize=(12, 3.5 * len(operations)), squeeze=False, layout="constrained"
    )
    for panel, (operation, records) in zip(panels[:, 0], operations.items(), strict=True):
        labels = [
            f"{r['rows']}\n{r['k']}→{r['n']}, {r['groups']}\n{r['distribution']}" for r in records
        ]
        report.draw_bars(panel, records, names, "tflops", labels)
        panel.set(ylabel="TFLOP/s", title=operation.replace("_", " "))
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    figure.suptitle(f"bfloat16 matmuls on {results['device']}")
    figure.savefig(path, dpi=120)
    plt.close(figure)
