"""What every report has: versions, seconds, who is missing, JSON, and the bars of plots."""

from __future__ import annotations

import importlib.metadata
import json
import pathlib
import platform
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
import numpy as np
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

# The contenders without which a case does not count; of several in one tuple, one is enough.
Required = tuple[tuple[str, ...], ...]
Record = dict[str, Any]


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


def add_seconds(records: list[Record], summary: str) -> None:
    """Adds what all benchmarks tell of a measurement.

    seconds: the "median" or "mean", as `summary` says; the mean of those of several rounds, without
      the first, before which the device may have been idle.
    jax_ep_speedup: its seconds over those of jax_ep, if it was measured.
    """
    for record in records:
        measurements = record["measurements"]
        for measurement in measurements.values():
            if "error" not in measurement:
                rounds = measurement["rounds"]
                seconds = [times[summary] for times in rounds[1:] or rounds]
                measurement["seconds"] = sum(seconds) / len(seconds)
        ours = measurements.get(OURS, {}).get("seconds")
        for measurement in measurements.values():
            if ours is not None and "seconds" in measurement:
                measurement["jax_ep_speedup"] = measurement["seconds"] / ours


def add_missing(results: dict[str, Any], required: Callable[[Record], Required]) -> None:
    """Adds who is missing, and whether the results count."""
    results["missing"] = missing(results["cases"], required)
    results["counts"] = bool(results["cases"]) and not results["missing"] and not results["smoke"]


def missing(records: list[Record], required: Callable[[Record], Required]) -> list[dict[str, Any]]:
    """The required contenders without a time, why, and in how many of the cases."""
    counts: dict[tuple[str, str], int] = {}
    for record in records:
        for names in required(record):
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
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(results, indent=1) + "\n")
    temporary.replace(path)


# ---- what people see


def by_operation(records: list[Record]) -> dict[str, list[Record]]:
    """The records of each operation, in the order in which they come."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record["operation"], []).append(record)
    return found


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


def show_missing(results: dict[str, Any], console: Console) -> None:
    """Prints who is missing, and whether the results count."""
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


def contender_names(records: list[Record]) -> list[str]:
    """All that were tried, in the order of the first record that has them."""
    return list(dict.fromkeys(name for record in records for name in record["measurements"]))


def draw_bars(
    panel: Axes, records: list[Record], names: list[str], figure: str, labels: list[str]
) -> None:
    """A group of bars for each record: `figure` of each contender, 0 for one without it."""
    width = 0.8 / max(1, len(names))
    for index, name in enumerate(names):
        heights = [r["measurements"].get(name, {}).get(figure, 0.0) for r in records]
        places = np.arange(len(records)) + (index - (len(names) - 1) / 2) * width
        panel.bar(places, heights, width, label=name, color=f"C{index}")
    panel.set_xticks(range(len(records)), labels, fontsize=8)
