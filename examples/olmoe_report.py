"""The record of each layer's run, and the picture of all that a folder has."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pathlib
import statistics

import matplotlib as mpl
from rich.console import Console
from rich.table import Table

mpl.use("Agg")
from matplotlib import pyplot as plt

UNTIMED_STEPS = 3  # the first ones, in which clocks and allocations settle


@dataclasses.dataclass
class Run:
    """A training run with one layer.

    Attributes:
      layer: its name.
      device: how many of what.
      tokens: per step, over all devices.
      losses: nats per token of each step.
      seconds: of each step.
      rest: the median seconds of a step without experts.
      held_out: nats per token of held-out text after the last step, once that is known.
    """

    layer: str
    device: str
    tokens: int
    rest: float
    losses: list[float] = dataclasses.field(default_factory=list[float])
    seconds: list[float] = dataclasses.field(default_factory=list[float])
    held_out: float | None = None

    @property
    def step_seconds(self) -> float:
        """The median."""
        return statistics.median(self.seconds[UNTIMED_STEPS:] or self.seconds)

    def write(self, folder: pathlib.Path) -> None:
        """Writes the record: LAYER.json."""
        (folder / f"{self.layer}.json").write_text(json.dumps(dataclasses.asdict(self)))


def read(folder: pathlib.Path) -> list[Run]:
    """Returns the runs of a folder, also those of earlier commands."""
    paths = sorted(folder.glob("*.json"))
    return [Run(**json.loads(path.read_text())) for path in paths]


def largest_difference(runs: list[Run]) -> float:
    """Returns the largest distance of two loss curves, means of ten steps; of NaN infinity."""
    found = [0.0]
    for one, other in itertools.combinations(runs, 2):
        pairs = list(zip(one.losses, other.losses, strict=False))
        for start in range(0, max(1, len(pairs) - 9), 10):
            distance = abs(statistics.fmean(a - b for a, b in pairs[start : start + 10]))
            found.append(math.inf if math.isnan(distance) else distance)
    return max(found)


def plot(runs: list[Run], path: pathlib.Path) -> None:
    """Draws the loss curves, and beside them stacked step times with tokens per second."""
    figure, (curves, bars) = plt.subplots(1, 2, figsize=(13, 4.5), layout="constrained")
    styles = ("-", "--", ":")
    for index, run in enumerate(sorted(runs, key=lambda run: -len(run.losses))):
        steps = range(1, len(run.losses) + 1)
        style = styles[index % len(styles)]
        curves.plot(steps, run.losses, style, linewidth=2 - 0.4 * index, label=run.layer)
    curves.set(
        xlabel="step", ylabel="loss (nats per token)", title="loss on the text of Python's library"
    )
    curves.legend()
    for row, run in enumerate(runs):
        total, rest = run.step_seconds * 1e3, run.rest * 1e3
        bars.barh(row, rest, color="lightgray", label="all else" if row == 0 else None)
        bars.barh(
            row,
            max(0.0, total - rest),
            left=rest,
            color="C0",
            label="experts" if row == 0 else None,
        )
        rate = run.tokens / run.step_seconds
        bars.text(total, row, f" {total:.0f} ms, {rate:,.0f} tokens/s", va="center", fontsize=9)
    bars.set_yticks(range(len(runs)), [run.layer for run in runs])
    bars.set_xlim(0, 1.5e3 * max(run.step_seconds for run in runs))
    bars.set(xlabel="ms per step", title=f"a step of {runs[0].tokens} tokens, {runs[0].device}")
    bars.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def show(runs: list[Run], console: Console) -> None:
    """Prints a table of all runs."""
    columns = (
        "layer",
        "steps",
        "last loss",
        "held out",
        "ms per step",
        "experts",
        "tokens/s",
        "against jax_ep",
    )
    table = Table(*columns, title="Runs")
    ours = [run.step_seconds for run in runs if run.layer == "jax_ep"]
    for run in runs:
        table.add_row(
            run.layer,
            str(len(run.losses)),
            f"{run.losses[-1]:.3f}",
            f"{run.held_out:.4f}" if run.held_out is not None else "",
            f"{run.step_seconds * 1e3:.1f}",
            f"{(run.step_seconds - run.rest) * 1e3:.1f}",
            f"{run.tokens / run.step_seconds:,.0f}",
            f"{run.step_seconds / ours[0]:.2f} x" if ours else "",
        )
    console.print(table)
