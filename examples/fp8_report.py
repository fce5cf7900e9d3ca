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
    """The training runs of a recipe, one per seed.

    Attributes:
      recipe: its name.
      losses: nats per byte of each step.
      held_out: nats per byte of held-out text, by the number of steps done.
      seconds: of all steps of all seeds.
    """

    recipe: str
    losses: list[list[float]] = dataclasses.field(default_factory=list[list[float]])
    held_out: list[dict[int, float]] = dataclasses.field(default_factory=list[dict[int, float]])
    seconds: float = 0.0

    def begin(self) -> None:
        """Begins with another seed."""
        self.losses.append([])
        self.held_out.append({})

    def lasts(self) -> np.ndarray:
        """The held-out loss at the end, of each seed."""
        return np.array([losses[max(losses)] for losses in self.held_out])

    def means(self) -> dict[int, float]:
        """The mean held-out loss by the number of steps, of the seeds that got so far."""
        steps = self.held_out[0]
        return {n: float(np.mean([h[n] for h in self.held_out if n in h])) for n in steps}


def final_differences(runs: list[Run]) -> dict[str, tuple[float, float]]:
    """Returns how far each recipe ends from bfloat16, relative: mean and standard error over seeds.

    A NaN makes the mean NaN, which fails every comparison.
    """
    baseline = [run.lasts() for run in runs if run.recipe == BASELINE]
    if not baseline:
        return {}
    found = {}
    for run in runs:
        if run.recipe != BASELINE:
            each = run.lasts() / baseline[0] - 1
            error = float(np.std(each, ddof=1)) / len(each) ** 0.5 if len(each) > 1 else np.nan
            found[run.recipe] = float(np.mean(each)), error
    return found


def write(runs: list[Run], device: str, folder: pathlib.Path) -> None:
    """Writes the table of held-out losses, and the losses of all steps of each seed."""
    means = [run.means() for run in runs]
    rows = [[str(n), *(f"{mean[n]:.4f}" for mean in means)] for n in means[0]]
    seeds = len(runs[0].held_out)
    table = {
        "caption": f"Held-out loss (nats per byte) by the number of steps, means of {seeds} seeds.",
        "device": device,
        "columns": ["step", *(run.recipe for run in runs)],
        "rows": rows,
    }
    (folder / "fp8_training.json").write_text(json.dumps(table) + "\n")
    everything = {
        run.recipe: {"losses": run.losses, "held_out": run.held_out, "seconds": run.seconds}
        for run in runs
    }
    (folder / "losses.json").write_text(json.dumps(everything))


def plot(runs: list[Run], device: str, path: pathlib.Path) -> None:
    """Draws losses, and beside them how far held-out losses are from bfloat16."""
    figure, (curves, distances) = plt.subplots(1, 2, figsize=(13, 4.2), layout="constrained")
    styles = ("o-", "s--", "^:")
    for index, run in enumerate(runs):
        color, style = f"C{index}", styles[index % len(styles)]
        for losses in run.losses:
            curves.plot(range(1, len(losses) + 1), losses, color=color, alpha=0.1)
        steps, means = zip(*run.means().items(), strict=True)
        curves.plot(steps, means, style, color=color, markersize=3, label=run.recipe)
        if index:
            percent = 100 * (np.array(means) / list(runs[0].means().values()) - 1)
            distances.plot(steps, percent, style, color=color, markersize=3, label=run.recipe)
            for found, baseline in zip(run.held_out, runs[0].held_out, strict=True):
                both = [n for n in found if n in baseline]
                percents = [100 * (found[n] / baseline[n] - 1) for n in both]
                distances.plot(both, percents, color=color, alpha=0.2)
    curves.set(
        xlabel="step", ylabel="loss (nats per byte)", title="held-out loss; faint: training batches"
    )
    curves.legend()
    distances.axhspan(-1, 1, color="lightgray", alpha=0.4, label="1 %")
    distances.set(
        xlabel="step",
        ylabel="%",
        title=f"held-out loss against {runs[0].recipe}, {device}; faint: seeds",
    )
    distances.legend()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def show(runs: list[Run], console: Console) -> None:
    """Prints a table of all runs."""
    table = Table("experts", "steps", "training loss", "held-out loss", "ms per step", title="Runs")
    for run in runs:
        training = float(np.mean([losses[-20:] for losses in run.losses]))
        steps = sum(map(len, run.losses))
        table.add_row(
            run.recipe, str(steps), f"{training:.4f}", f"{np.mean(run.lasts()):.4f}",
            f"{1e3 * run.seconds / steps:.1f}",
        )  # fmt: skip
    console.print(table)
