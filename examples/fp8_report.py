"""The records of training runs in bfloat16 and in FP8: a table, a JSON file, and a picture."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import matplotlib as mpl
import numpy as np
from rich.console import Console
from rich.table import Table

mpl.use("Agg")
from matplotlib import pyplot as plt

BASELINE = "bfloat16"


@dataclasses.dataclass
class Run:
    """A training run.

    Attributes:
      recipe: its name.
      losses: nats per byte of each step.
      held_out: nats per byte of held-out text, by the number of steps done.
      seconds: of all steps.
    """

    recipe: str
    losses: list[float] = dataclasses.field(default_factory=list[float])
    held_out: dict[int, float] = dataclasses.field(default_factory=dict[int, float])
    seconds: float = 0.0

    @property
    def last(self) -> float:
        """The held-out loss at the end."""
        return self.held_out[max(self.held_out)]


def final_differences(runs: list[Run]) -> dict[str, float]:
    """Returns how far each recipe ends from bfloat16, relative; NaN fails every comparison."""
    baseline = [run.last for run in runs if run.recipe == BASELINE]
    others = [run for run in runs if run.recipe != BASELINE]
    return {run.recipe: run.last / baseline[0] - 1 for run in others if baseline}


def write(runs: list[Run], device: str, folder: pathlib.Path) -> None:
    """Writes the table of held-out losses, and the losses of all steps."""
    rows = [[str(n), *(f"{run.held_out[n]:.4f}" for run in runs)] for n in runs[0].held_out]
    table = {
        "caption": "Held-out loss (nats per byte) by the number of steps.",
        "device": device,
        "columns": ["step", *(run.recipe for run in runs)],
        "rows": rows,
    }
    (folder / "fp8_training.json").write_text(json.dumps(table) + "\n")
    steps = {run.recipe: run.losses for run in runs}
    (folder / "losses.json").write_text(json.dumps(steps))


def plot(runs: list[Run], device: str, path: pathlib.Path) -> None:
    """Draws losses, and beside them how far held-out losses are from bfloat16."""
    figure, (curves, distances) = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    baseline = runs[0].held_out
    styles = ("o-", "s--", "^:")
    for index, run in enumerate(runs):
        color, style = f"C{index}", styles[index % len(styles)]
        curves.plot(range(1, len(run.losses) + 1), run.losses, color=color, alpha=0.2)
        steps, losses = zip(*run.held_out.items(), strict=True)
        curves.plot(steps, losses, style, color=color, markersize=3, label=run.recipe)
        if index:
            percent = 100 * (np.array(losses) / list(baseline.values()) - 1)
            distances.plot(steps, percent, style, color=color, markersize=3, label=run.recipe)
    curves.set(
        xlabel="step", ylabel="loss (nats per byte)", title="held-out loss; faint: training batches"
    )
    curves.legend()
    distances.axhspan(-1, 1, color="lightgray", alpha=0.4, label="1 %")
    distances.set(
        xlabel="step", ylabel="%", title=f"held-out loss against {runs[0].recipe}, {device}"
    )
    distances.legend()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def show(runs: list[Run], console: Console) -> None:
    """Prints a table of all runs."""
    table = Table("experts", "steps", "training loss", "held-out loss", "ms per step", title="Runs")
    for run in runs:
        training = float(np.mean(run.losses[-20:]))
        table.add_row(
            run.recipe, str(len(run.losses)), f"{training:.4f}", f"{run.last:.4f}",
            f"{1e3 * run.seconds / len(run.losses):.1f}",
        )  # fmt: skip
    console.print(table)
