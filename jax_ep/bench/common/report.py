"""Reports of all benchmarks: versions, JSON, a table, and plots."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import pathlib
import platform
import statistics
import textwrap
from collections.abc import Iterator
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
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

mpl.use("Agg")  # files alone; no window

OURS = "jax_ep"
PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "nvidia-cublas",
    "nvidia-cublas-cu12",
    "nvidia-nccl-cu13",
    "nvidia-nccl-cu12",
    "tokamax",
    "torch",
    "triton",
)
MIN_SWEEP = 3  # values of a size, from which on a line is drawn over them
LABEL_CHARACTERS = 18  # per line, below bars
# Inches of panels: of bars, most of which are of the first figure; of few bars, and of lines.
WIDTHS_OF_BARS, WIDTH_OF_FEW, WIDTH_OF_LINES = ((10.0,), (8.5, 2.0)), 3.5, 6.5

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number of a measurement: its key, its heading, and its format."""

    key: str
    heading: str
    format: str = ".3g"

    def cell(self, measurement: dict[str, Any]) -> str:
        """Returns the text in a table."""
        value = measurement.get(self.key)
        return "" if value is None else format(value, self.format)


def counted(rounds: list[float]) -> list[float]:
    """Returns the rounds that count: all but the first of several."""
    return rounds[1:] or rounds


def ratio(rounds: list[float], others: list[float]) -> float:
    """Returns the median over those rounds that both have."""
    return statistics.median(counted([a / b for a, b in zip(rounds, others, strict=False)]))


def versions() -> dict[str, str | None]:
    """Returns the version of everything that affects a time; None for what is not installed."""
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


def write(results: dict[str, Any], path: pathlib.Path) -> None:
    """Writes the results so far, in one step: a reader never sees half of them."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(results, indent=1) + "\n")
    temporary.replace(path)


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


# ---- tables


def show(results: dict[str, Any], figures: tuple[Figure, ...], console: Console) -> None:
    """Prints a table for each operation, what is missing, and whether this is a result."""
    for operation, records in by_operation(results["cases"]).items():
        console.print(_table(records, figures, f"{operation} on {where(results)}"))
    for gap in results["missing"]:
        console.print(
            f"missing in {gap['cases']} of {len(results['cases'])} cases: {gap['provider']}: "
            f"{gap['reason']}",
            style="yellow",
            markup=False,
        )
    for error in results["not_run"]:
        console.print(
            f"did not run in {error['cases']} of {len(results['cases'])} cases: "
            f"{error['provider']}: {error['reason']}",
            markup=False,
        )
    if not results["counts"]:
        console.print(
            "This is not a result: " + ("a smoke test." if results["smoke"] else "see above.")
        )


def _table(records: list[Record], figures: tuple[Figure, ...], title: str) -> Table:
    table = Table(title=title)
    table.add_column("case")
    table.add_column("provider")
    for heading in ("µs", "fastest", "slowest", *(f.heading for f in figures), "jax_ep is faster"):
        table.add_column(heading, justify="right")
    for record in records:
        case = record["key"].partition("/")[2]
        for name, measurement in record["measurements"].items():
            table.add_row(case, name, *_cells(name, measurement, figures))
            case = ""  # once
        table.add_section()
    return table


def _cells(name: str, measurement: dict[str, Any], figures: tuple[Figure, ...]) -> list[str]:
    if "error" in measurement:
        return ["error"]
    seconds = (
        measurement["seconds"],
        min(times["minimum"] for times in measurement["rounds"]),
        max(times["maximum"] for times in measurement["rounds"]),
    )
    speedup = measurement.get("jax_ep_speedup")
    return [
        *(f"{s * 1e6:.1f}" for s in seconds),
        *(figure.cell(measurement) for figure in figures),
        "" if speedup is None or name == OURS else f"{speedup:.2f}x",
    ]


def where(results: dict[str, Any]) -> str:
    """Returns the number and the name of the devices."""
    return f"{results['num_devices']} x {results['device']}"


def by_operation(records: list[Record]) -> dict[str, list[Record]]:
    """Returns the records of each operation, in their order."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record["operation"], []).append(record)
    return found


def provider_names(records: list[Record]) -> list[str]:
    """Returns all providers, in the order of the first record that has them."""
    return list(dict.fromkeys(name for record in records for name in record["measurements"]))


# ---- plots


def plot(
    results: dict[str, Any], figures: tuple[Figure, ...], sweep: str | None, path: pathlib.Path
) -> None:
    """Writes panels for each operation: bars of cases, and lines over the size `sweep`.

    A case is in the panel of the last of the figures that it has. Lines are of the first one.
    """
    records = results["cases"]
    operations = by_operation(records)
    families_of_all = _families(records, sweep)
    swept = {family for family in families_of_all if family is not None}
    singles = [r for r, f in zip(records, families_of_all, strict=True) if f not in swept]
    bars = [figure for figure in figures if any(_figure(r, figures) == figure for r in singles)]
    widths = _widths(len(bars), bool(swept))
    canvas, panels = plt.subplots(
        len(operations),
        len(widths),
        figsize=(sum(widths), 3 * len(operations)),
        width_ratios=widths,
        squeeze=False,
        layout="constrained",
    )
    names = provider_names(records)
    for row, (operation, members) in zip(panels, operations.items(), strict=True):
        families = _families(members, sweep)
        lines = [r for r, f in zip(members, families, strict=True) if f in swept]
        drawn = [*bars, figures[0]] if swept else bars
        for panel, figure in zip(row, drawn, strict=True):
            panel.set(ylabel=figure.heading, title=operation.replace("_", " "))
        for panel, figure in zip(row, bars, strict=False):
            alone = [r for r, f in zip(members, families, strict=True) if f not in swept]
            alone = [record for record in alone if _figure(record, figures) == figure]
            draw_bars(panel, alone, names, figure)
        if lines and sweep is not None:
            draw_lines(row[-1], lines, names, figures[0], sweep)
        for panel in row:
            panel.set_ylim(bottom=0)
    handles = {
        label: handle
        for panel in panels.flat
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    canvas.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
    canvas.suptitle(f"{results['benchmark']} on {where(results)}")
    canvas.savefig(path, dpi=120)
    plt.close(canvas)


def _figure(record: Record, figures: tuple[Figure, ...]) -> Figure:
    """Returns the last of the figures that a case has, otherwise the first."""
    has = [f for f in figures if any(f.key in m for m in record["measurements"].values())]
    return has[-1] if has else figures[0]


def _widths(num_bars: int, has_lines: bool) -> tuple[float, ...]:
    if not has_lines:
        return WIDTHS_OF_BARS[num_bars - 1]
    return (WIDTH_OF_FEW,) * num_bars + (WIDTH_OF_LINES if num_bars else sum(WIDTHS_OF_BARS[0]),)


def _families(records: list[Record], sweep: str | None) -> list[tuple[Any, ...] | None]:
    """Returns for each record the sizes that it shares with a line, or None outside of lines."""
    if sweep is None:
        return [None] * len(records)
    fixed = [
        (r["variant"], *((k, v) for k, v in r["sizes"].items() if k != sweep)) for r in records
    ]
    values: dict[Any, set[Any]] = {}
    for record, family in zip(records, fixed, strict=True):
        values.setdefault(family, set()).add(record["sizes"][sweep])
    return [family if len(values[family]) >= MIN_SWEEP else None for family in fixed]


def draw_bars(panel: Axes, records: list[Record], names: list[str], figure: Figure) -> None:
    """Draws a group of bars for each record, one for each provider."""
    width = 0.8 / max(1, len(names))
    for index, name in enumerate(names):
        heights = [r["measurements"].get(name, {}).get(figure.key) or 0.0 for r in records]
        positions = np.arange(len(records)) + (index - (len(names) - 1) / 2) * width
        panel.bar(positions, heights, width, label=name, color=f"C{index}")
    labels = ["\n".join(_wrapped(r["key"].partition("/")[2])) for r in records]
    panel.set_xticks(range(len(records)), labels, fontsize=8)


def _wrapped(key: str) -> Iterator[str]:
    for part in key.split("/"):
        yield from textwrap.wrap(part, LABEL_CHARACTERS)


def draw_lines(
    panel: Axes, records: list[Record], names: list[str], figure: Figure, sweep: str
) -> None:
    """Draws a line for each provider; of calls measured singly and chained, the chained ones."""
    for index, name in enumerate(names):
        measured = [r for r in records if r["measurements"].get(name, {}).get(figure.key)]
        measured.sort(key=lambda r: r["chained"])
        points = {r["sizes"][sweep]: r["measurements"][name][figure.key] for r in measured}
        if points:
            panel.plot(
                *zip(*sorted(points.items()), strict=True), "o-", color=f"C{index}", label=name
            )
    panel.set_xscale("log", base=2)
    values = sorted({record["sizes"][sweep] for record in records})
    panel.set_xticks(values, list(map(str, values)), fontsize=8)
    panel.set_xlabel(f"{sweep} per rank")
    fixed = (f"{k} {v}".replace("_", "-") for k, v in records[0]["sizes"].items() if k != sweep)
    panel.set_title(", ".join([panel.get_title(), *fixed]))
