"""The output of a training run: progress, plots, and a summary of its claims."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, NamedTuple

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

mpl.use("Agg")
from matplotlib import pyplot as plt


class Claim(NamedTuple):
    """One thing that a run claims."""

    text: str
    measured: str
    holds: bool


@dataclasses.dataclass
class History:
    """The record of each step.

    Attributes:
      losses: nats a byte on the step's batch.
      expert_loads: int32[layers, experts], choices each expert got.
      held_out: nats a byte on held-out text, by the number of steps done.
    """

    losses: list[float] = dataclasses.field(default_factory=list[float])
    expert_loads: list[np.ndarray] = dataclasses.field(default_factory=list[np.ndarray])
    held_out: dict[int, float] = dataclasses.field(default_factory=dict[int, float])

    def append(self, loss: float, expert_load: np.ndarray) -> None:
        """Adds a step."""
        self.losses.append(loss)
        self.expert_loads.append(expert_load)

    def relative_shares(self) -> np.ndarray:
        """Each expert's share of its layer's choices over the even share: [steps, layers, E]."""
        loads = np.stack(self.expert_loads).astype(np.float64)
        return loads / loads.mean(-1, keepdims=True)

    def smallest_share(self, num_steps: int) -> float:
        """The smallest of these over experts and layers, for the last `num_steps` together."""
        return float(self.relative_shares()[-num_steps:].mean(0).min())

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "losses": self.losses,
            "expert_loads": [load.tolist() for load in self.expert_loads],
            "held_out": list(self.held_out.items()),
        }

    @staticmethod
    def from_json(saved: dict[str, Any]) -> History:
        """The inverse of `to_json`."""
        return History(
            losses=saved["losses"],
            expert_loads=[np.array(load, np.int32) for load in saved["expert_loads"]],
            held_out={step: loss for step, loss in saved["held_out"]},
        )


def progress_bar() -> Progress:
    """A bar with a text field `info` at its end."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[info]}"),
    )


def plot(
    history: History, ngrams: dict[str, float], folder: pathlib.Path, *, min_share: float
) -> None:
    """Writes loss.png and expert_load.png, the latter with a line at the share claimed."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    steps = np.arange(1, len(history.losses) + 1)
    axes.plot(steps, history.losses, color="tab:blue", alpha=0.35, label="training batch")
    axes.plot(*zip(*sorted(history.held_out.items()), strict=True), "o-", label="held-out files")
    for (name, loss), style in zip(ngrams.items(), ("--", ":"), strict=True):
        axes.axhline(loss, color="black", linestyle=style, label=f"byte {name} model, held-out")
    axes.set(xlabel="step", ylabel="loss (nats a byte)", title="Language model loss")
    axes.legend()
    figure.savefig(folder / "loss.png", dpi=120)

    shares = history.relative_shares()
    num_layers = shares.shape[1]
    width = max(1, len(shares) // 60)
    figure, rows = plt.subplots(
        1, num_layers, figsize=(3.2 * num_layers, 3.2), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for layer, axes in enumerate(rows[0]):
        count = len(shares) // width
        means = shares[: count * width, layer].reshape(count, width, -1).mean(1)
        axes.plot(np.arange(1, count + 1) * width, means, linewidth=0.8)
        axes.axhline(1, color="black", linewidth=0.8, linestyle="--", label="even share")
        axes.axhline(min_share, color="red", linewidth=0.8, linestyle=":", label="smallest claimed")
        axes.set(xlabel="step", title=f"layer {layer + 1}")
    handles, labels = rows[0, 0].get_legend_handles_labels()
    rows[0, 0].legend(handles, labels, fontsize="small")
    rows[0, 0].set_ylabel("share of tokens, even share = 1")
    figure.suptitle("Load of each expert")
    figure.savefig(folder / "expert_load.png", dpi=120)


def print_summary(
    history: History, ngrams: dict[str, float], claims: list[Claim], *, seconds: float
) -> None:
    """A table of losses, a table of claims, and a line for each claim that does not hold."""
    console = Console()
    losses = Table("nats a byte", "loss", title="Losses")
    held_out = history.held_out[len(history.losses)]
    for name, loss in {
        f"training, last of {len(history.losses)} steps": history.losses[-1],
        "held-out files": held_out,
        **{f"byte {name} model on these": loss for name, loss in ngrams.items()},
    }.items():
        losses.add_row(name, f"{loss:.3f}")
    console.print(losses)
    table = Table("claim", "measured", "holds", title=f"Claims, after {seconds:.0f} s")
    for claim in claims:
        table.add_row(claim.text, claim.measured, "yes" if claim.holds else "NO")
    console.print(table)
    for claim in claims:
        if not claim.holds:
            console.print(f"FAILED: {claim.text}: {claim.measured} is not so", soft_wrap=True)
