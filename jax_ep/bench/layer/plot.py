"""Stacked bars of where a layer's time goes, with the baselines beside them."""

from __future__ import annotations

import pathlib
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from jax_ep.bench.common.report import OURS, Record, where

OURS_COLOR, OTHERS_COLOR = "black", "gray"
MANY_TIMES = 8  # a baseline that takes longer than this times jax_ep is cut off


def plot(results: dict[str, Any], path: pathlib.Path) -> None:
    """Writes a panel for each case: parts, dense parts, jax_ep, and every baseline."""
    records = [r for r in results["cases"] if OURS in _times(r)]
    if not records:
        return
    columns = min(2, len(records))
    rows = -(-len(records) // columns)
    canvas, panels = plt.subplots(
        rows, columns, figsize=(9 * columns, 4.5 * rows), squeeze=False, layout="constrained"
    )
    for panel in panels.flat[len(records) :]:
        panel.set_visible(False)
    for panel, record in zip(panels.flat, records, strict=False):
        draw(panel, record)
    canvas.suptitle(f"where the time of a layer goes, on {where(results)}")
    canvas.savefig(path, dpi=110)
    plt.close(canvas)


def draw(panel: Axes, record: Record) -> None:
    """Draws the bars of one case."""
    times = _times(record)
    parts = {n.partition(": ")[2]: s for n, s in times.items() if n.startswith("part: ")}
    dense = {n.partition(": ")[2]: s for n, s in times.items() if n.startswith("dense: ")}
    names = list(parts | dense)
    colors = {name: f"C{index % 10}" for index, name in enumerate(names)}
    hatches = {name: "//" if index >= 10 else None for index, name in enumerate(names)}
    bars = {"parts, each alone": parts}
    if dense:
        bars["the same, dense matmuls"] = parts | dense
    for row, stack in enumerate(bars.values()):
        left = 0.0
        for name, seconds in stack.items():
            panel.barh(
                row,
                seconds * 1e3,
                left=left,
                color=colors[name],
                hatch=hatches[name],
                edgecolor="white",
                label=name if row == 0 or name not in parts else None,
            )
            left += seconds * 1e3
        panel.text(left, row, f" {left:.3g}", va="center", fontsize=8)
    labels = list(bars)
    longest = MANY_TIMES * times[OURS]
    for name, seconds in times.items():
        if name.startswith(("part: ", "dense: ")):
            continue
        row, drawn = len(labels), min(seconds, longest) * 1e3
        labels.append(name)
        panel.barh(row, drawn, color=OURS_COLOR if name.startswith(OURS) else OTHERS_COLOR)
        ratio = "" if name == OURS else f" ({seconds / times[OURS]:.2f} x)"
        panel.text(drawn, row, f" {seconds * 1e3:.3g}{ratio}", va="center", fontsize=8)
    panel.set_yticks(range(len(labels)), labels, fontsize=8)
    panel.invert_yaxis()
    panel.margins(x=0.15)
    panel.set(xlabel="ms", title=record["key"])
    panel.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))  # beside the bars


def _times(record: Record) -> dict[str, float]:
    """The seconds of every provider that has any."""
    measurements = record["measurements"].items()
    return {name: m["seconds"] for name, m in measurements if "seconds" in m}
