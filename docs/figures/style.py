"""The look that all figures share: colors, lanes of a timeline, boxes and arrows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

INK = "#1f2933"
FAINT = "#7b8794"
GRID = "#e4e7eb"
BACKGROUND = "#ffffff"

# The kinds of spans in a timeline.
COLORS = {
    "plan": "#d9c8f0",  # counts, numbers, inverts the plan
    "send": "#a9cdf5",  # stores to peers
    "expand": "#b5e2c0",  # copies rows within this GPU
    "sum": "#fbd9a5",  # adds rows in float32
    "compute": "#f6b8b0",  # tensor cores
    "pale": "#fbe3df",  # the same, of another tile
    "wait": "#f5f7fa",
    "end": "#d5dae0",
}

OUTGOING = "#2f6fb7"  # signals of this rank
INCOMING = "#a85d0a"  # signals of its peers

WIDTH = 9.0  # inches: 900 pixels at 100 per inch
DPI = 200
FONT = 8.5
SMALL = 7.2


def new_figure(height: float, width: float = 100.0, rows: float = 50.0) -> tuple[Figure, Axes]:
    """An empty canvas of `width` x `rows` units without axes."""
    plt.rcParams["font.family"] = "DejaVu Sans"
    figure = plt.figure(figsize=(WIDTH, height), facecolor=BACKGROUND)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0, width)
    axes.set_ylim(0, rows)
    axes.axis("off")
    return figure, axes


def text(
    axes: Axes,
    x: float,
    y: float,
    words: str,
    *,
    size: float = FONT,
    color: str = INK,
    align: str = "center",
    bold: bool = False,
    mono: bool = False,
    paper: bool = False,
) -> None:
    """Writes `words`, centered on y; `paper` hides what is behind them."""
    axes.text(
        x,
        y,
        words,
        fontsize=size,
        color=color,
        ha=align,
        va="center",
        fontweight="bold" if bold else "normal",
        family="DejaVu Sans Mono" if mono else "DejaVu Sans",
        linespacing=1.25,
        zorder=5,
        bbox={"facecolor": BACKGROUND, "edgecolor": "none", "pad": 1.5} if paper else None,
    )


def box(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    color: str,
    *,
    edge: str = INK,
    line: float = 0.7,
    rounded: bool = True,
    dashed: bool = False,
    panel: bool = False,
) -> None:
    """A box whose lower left corner is (x, y); a `panel` is behind everything."""
    style = "round,pad=0,rounding_size=0.5" if rounded else "square,pad=0"
    axes.add_patch(
        FancyBboxPatch(
            (x, y),
            width,
            height,
            boxstyle=style,
            facecolor=color,
            edgecolor=edge,
            linewidth=line,
            linestyle="--" if dashed else "-",
            zorder=1 if panel else 3,
        )
    )


def arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    *,
    color: str = INK,
    line: float = 1.0,
    behind: bool = False,
) -> None:
    """An arrow from `start` to `end`, behind the boxes or before them."""
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=8,
            color=color,
            linewidth=line,
            shrinkA=0,
            shrinkB=0,
            zorder=2 if behind else 4,
        )
    )


@dataclasses.dataclass(frozen=True)
class Lane:
    """One row of a timeline: who acts."""

    name: str
    detail: str
    y: float  # its middle
    height: float = 5.0


class Timeline:
    """Lanes from left to right in time, on a canvas of 100 units across."""

    def __init__(self, title: str, lanes: Sequence[Lane], *, height: float, rows: float) -> None:
        self.figure, self.axes = new_figure(height, rows=rows)
        self.lanes = {lane.name: lane for lane in lanes}
        self.first = 17.0  # where time begins
        text(self.axes, 1.5, rows - 2.2, title, size=10.5, align="left", bold=True)
        for lane in lanes:
            low = lane.y - lane.height / 2 - 0.8
            self.axes.add_patch(
                Rectangle((0.8, low), 98.4, lane.height + 1.6, facecolor="#fafbfc", zorder=0)
            )
            shift = 1.1 if lane.detail else 0.0
            text(self.axes, 1.5, lane.y + shift, lane.name, align="left", bold=True)
            if lane.detail:
                text(
                    self.axes, 1.5, lane.y - 1.2, lane.detail, size=SMALL, color=FAINT, align="left"
                )

    def span(self, lane: str, start: float, end: float, words: str, kind: str) -> None:
        """Work from `start` to `end`."""
        row = self.lanes[lane]
        low = row.y - row.height / 2
        box(self.axes, start, low, end - start, row.height, COLORS[kind], rounded=False)
        if kind == "wait":
            self.axes.add_patch(
                Rectangle(
                    (start, low),
                    end - start,
                    row.height,
                    facecolor="none",
                    edgecolor="#c3cad3",
                    hatch="////",
                    linewidth=0,
                    zorder=3,
                )
            )
        self._label((start + end) / 2, row.y, words, kind)

    def _label(self, x: float, y: float, words: str, kind: str) -> None:
        self.axes.text(
            x,
            y,
            words,
            fontsize=SMALL,
            ha="center",
            va="center",
            color=INK,
            linespacing=1.2,
            zorder=5,
            bbox={"facecolor": "#ffffff", "edgecolor": "none", "pad": 0.8, "alpha": 0.85}
            if kind == "wait"
            else None,
        )

    def band(self, lane: str, words: str) -> None:
        """A lane without spans: something that stands for all of its time."""
        row = self.lanes[lane]
        low = row.y - row.height / 2
        box(self.axes, self.first, low, 82.0, row.height, "#e6ecf3", rounded=False, line=0.0)
        text(self.axes, 97.5, row.y, words, size=SMALL, color=FAINT, align="right")

    def note(self, words: str) -> None:
        """A line at the foot."""
        text(self.axes, 1.5, 1.6, words, size=SMALL, align="left")

    def edge(self, lane: str, above: bool) -> float:
        """The y of a lane's upper or lower edge."""
        row = self.lanes[lane]
        return row.y + (row.height / 2 if above else -row.height / 2)

    def signal(
        self,
        source: str,
        start: float,
        target: str,
        end: float,
        words: str = "",
        *,
        side: str = "right",
        at: float = 0.5,
        color: str = OUTGOING,
    ) -> None:
        """A store from one lane to another, with its label beside the arrow."""
        down = self.lanes[source].y > self.lanes[target].y
        first = (start, self.edge(source, not down))
        last = (end, self.edge(target, down))
        arrow(self.axes, first, last, color=color)
        if words:
            x = first[0] + (last[0] - first[0]) * at
            y = first[1] + (last[1] - first[1]) * at
            shift = 0.6 if side == "right" else -0.6
            text(
                self.axes,
                x + shift,
                y,
                words,
                size=SMALL - 0.4,
                color=color,
                align="left" if side == "right" else "right",
            )

    def time_axis(self, y: float, words: str = "time (not to scale)") -> None:
        """An arrow to the right below the lanes."""
        arrow(self.axes, (self.first, y), (99.0, y), color=FAINT, line=0.8)
        text(self.axes, 99.0, y - 1.4, words, size=SMALL, color=FAINT, align="right")

    def legend(self, y: float, entries: Sequence[tuple[str, str]]) -> None:
        """Colored squares with words, in one line."""
        x = self.first
        for kind, words in entries:
            box(self.axes, x, y - 0.8, 2.0, 1.6, COLORS[kind], rounded=False, line=0.5)
            text(self.axes, x + 2.6, y, words, size=SMALL, align="left")
            x += 4.6 + 0.80 * len(words)
