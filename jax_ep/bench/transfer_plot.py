"""The plot of transfers: GB/s of shapes, over tokens, and over multiprocessors."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from jax_ep.bench import report
from jax_ep.bench.report import Record

FIGURE = "gigabytes_per_second"
SWEEP = 3  # numbers of tokens, from which on they are drawn as a line

Draw = Callable[[Axes, list[Record], list[str]], None]


def plot(results: dict[str, Any], path: pathlib.Path) -> None:
    """Writes GB/s: a row of panels for each operation; bars, lines over tokens, over SMs."""
    records = results["cases"]
    columns = _columns(records)
    operations = report.by_operation(records)
    figure, panels = plt.subplots(
        len(operations),
        len(columns),
        figsize=(9 * len(columns), 3.5 * len(operations)),
        squeeze=False,
        layout="constrained",
    )
    names = report.contender_names(records)
    for row, operation in zip(panels, operations, strict=True):
        for panel, (title, draw, of_column) in zip(row, columns, strict=True):
            draw(panel, [r for r in of_column if r["operation"] == operation], names)
            panel.set(ylabel="GB/s", title=f"{operation.replace('_', ' ')}{title}")
            panel.set_ylim(bottom=0)
    handles = {
        label: handle
        for panel in panels.flat
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    wide = 2 * len(columns)  # as many labels as a figure of this width has room for
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(wide, 4))
    figure.suptitle(
        f"de-duplicated remote bytes of the busiest of {results['ranks']} x {results['device']}"
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _columns(records: list[Record]) -> list[tuple[str, Draw, list[Record]]]:
    """Of every column of panels: its title, how to draw it, and its records."""
    families: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        family = *(record[x] for x in ("hidden", "experts", "choices")), record["routing"]
        families.setdefault(family, []).append(record)
    columns: list[tuple[str, Draw, list[Record]]] = []
    bars: list[Record] = []
    for (hidden, experts, choices, routing), members in families.items():
        if len({record["tokens"] for record in members}) >= SWEEP:
            title = f", H={hidden}, E={experts}, K={choices}, {routing}"
            columns.append((title, _draw_sweep, members))
        else:
            bars += members
    if bars:
        columns.insert(0, ("", _draw_bars, bars))
    limits = {limit for record in records for limit, _ in _by_num_sms(record)}
    if len(limits) > 1:
        columns.append((": jax_ep with few multiprocessors", _draw_num_sms, records))
    return columns


def _draw_bars(panel: Axes, records: list[Record], names: list[str]) -> None:
    report.draw_bars(panel, records, names, FIGURE, [_label(record) for record in records])


def _draw_sweep(panel: Axes, records: list[Record], names: list[str]) -> None:
    for index, name in enumerate(names):
        for chained, style in ((False, "o-"), (True, "o--")):
            points = sorted(
                (record["tokens"], record["measurements"][name][FIGURE])
                for record in records
                if (record["chained"] > 1) == chained
                and FIGURE in record["measurements"].get(name, {})
            )
            if points:
                label = f"{name}, chained" if chained else name
                panel.plot(*zip(*points, strict=True), style, color=f"C{index}", label=label)
    panel.set_xscale("log", base=2)
    tokens = sorted({record["tokens"] for record in records})
    panel.set_xticks(tokens, list(map(str, tokens)))
    panel.set_xlabel("tokens a rank")


def _draw_num_sms(panel: Axes, records: list[Record], names: list[str]) -> None:
    lines = {}
    for record in records:
        points = sorted(_by_num_sms(record))
        if points:
            (line,) = panel.plot(*zip(*points, strict=True), "o-")
            lines[_label(record).replace("\n", ", ")] = line
    panel.legend(lines.values(), lines.keys(), fontsize=7)
    panel.set_xlabel("multiprocessors")


def _by_num_sms(record: Record) -> list[tuple[int, float]]:
    """Limit and GB/s of each measurement with a limit of multiprocessors."""
    return [
        (measurement["facts"]["num_sms"], measurement[FIGURE])
        for measurement in record["measurements"].values()
        if measurement.get("facts", {}).get("num_sms") is not None
    ]


def _label(record: Record) -> str:
    shape = f"T={record['tokens']}\nH={record['hidden']}, {record['choices']}/{record['experts']}"
    chained = ", chained" if record["chained"] > 1 else ""
    return f"{shape}\n{record['routing']}{chained}"
