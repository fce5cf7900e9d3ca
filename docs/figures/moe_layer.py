"""The data flow of one MoE layer over two ranks: what travels, and what each rank makes of it."""

from __future__ import annotations

import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

TOKENS = {  # each rank's tokens: name -> the two experts that its router chose
    0: {"a0": (0, 2), "a1": (0, 1), "a2": (2, 3)},
    1: {"b0": (1, 3), "b1": (2, 3), "b2": (0, 2)},
}
TOKEN_COLORS = {"a": "#a9cdf5", "b": "#fbd9a5"}
LINK_COLORS = {"a": "#2f6fb7", "b": "#c27a12"}
LOCAL = "#9aa5b1"
EXPERTS_PER_RANK = 2
NUM_ROWS = 8  # M

X_TOKENS, X_RING, X_ROWS, X_OUTPUTS, X_SUMS, X_RESULT = 3.0, 27.0, 43.0, 61.0, 80.0, 92.5
BASE = {0: 36.0, 1: 5.5}  # lower edge of each rank's rows
STEP = 2.75
CELL = 2.3


def rank_of(expert: int) -> int:
    """Where an expert lives."""
    return expert // EXPERTS_PER_RANK


def rows_of(rank: int) -> list[tuple[int, str]]:
    """(expert, token) of each row, in (local expert, source rank, token) order."""
    experts = range(rank * EXPERTS_PER_RANK, (rank + 1) * EXPERTS_PER_RANK)
    return [
        (expert, token)
        for expert in experts
        for source in TOKENS
        for token, chosen in TOKENS[source].items()
        if expert in chosen
    ]


def cell(axes: Axes, x: float, y: float, words: str, token: str, width: float = 5.0) -> None:
    """One row of H elements."""
    style.box(axes, x, y, width, CELL, TOKEN_COLORS[token[0]], line=0.6)
    style.text(axes, x + width / 2, y + CELL / 2, words, size=style.SMALL)


def row_y(rank: int, index: int) -> float:
    """The lower edge of row `index`, counted from the top."""
    return BASE[rank] + (NUM_ROWS - 1 - index) * STEP


def token_y(rank: int, index: int) -> float:
    """The lower edge of a token, or of its result."""
    return BASE[rank] + 14.2 - index * 5.6


def link(axes: Axes, start: tuple[float, float], end: tuple[float, float], token: str) -> None:
    """A row that crosses NVLink."""
    style.arrow(axes, start, end, color=LINK_COLORS[token[0]], line=1.7)


def local(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """A copy or a sum within one GPU."""
    style.arrow(axes, start, end, color=LOCAL, line=0.7, behind=True)


def draw_rank(axes: Axes, rank: int) -> dict[str, float]:
    """Everything that stays on a rank; returns where each remote token's ring slot is."""
    other = 1 - rank
    middle = CELL / 2
    for index, (token, chosen) in enumerate(TOKENS[rank].items()):
        y = token_y(rank, index)
        cell(axes, X_TOKENS, y, token, token)
        words = f"experts {chosen[0]}, {chosen[1]}"
        style.text(
            axes,
            X_TOKENS + 5.6,
            y + middle,
            words,
            size=style.SMALL,
            color=style.FAINT,
            align="left",
        )
    arrived = [t for t, chosen in TOKENS[other].items() if any(rank_of(e) == rank for e in chosen)]
    first = BASE[rank] + (4.6 if rank == 0 else 17.4)
    ring = {t: first - i * 3.6 for i, t in enumerate(arrived)}
    for token, y in ring.items():
        cell(axes, X_RING, y, token, token)

    rows = rows_of(rank)
    for index, (expert, token) in enumerate(rows):
        y = row_y(rank, index)
        cell(axes, X_ROWS, y, token, token)
        cell(axes, X_OUTPUTS, y, f"y({token})", token)
        source = X_TOKENS + 14.6 if token in TOKENS[rank] else X_RING + 5.0
        start = ring[token] if token in ring else token_y(rank, list(TOKENS[rank]).index(token))
        local(axes, (source, start + middle), (X_ROWS, y + middle))
        is_first = index == 0 or rows[index - 1][0] != expert
        size = sum(1 for e, _ in rows if e == expert)
        if is_first:
            center = y + middle - (size - 1) * STEP / 2
            low = y - (size - 1) * STEP - 0.25
            style.box(axes, 50.6, low, 7.4, (size - 1) * STEP + CELL + 0.5, style.COLORS["compute"])
            style.text(axes, 54.3, center, f"expert {expert}", size=style.SMALL)
            style.arrow(axes, (X_ROWS + 5.0, center), (50.6, center), line=0.9)
            style.arrow(axes, (58.0, center), (X_OUTPUTS, center), line=0.9)
    for index in range(len(rows), NUM_ROWS):
        for x in (X_ROWS, X_OUTPUTS):
            style.box(axes, x, row_y(rank, index), 5.0, CELL, "#ffffff", dashed=True, line=0.5)
            words = "tail" if x == X_ROWS else ""
            y = row_y(rank, index) + middle
            style.text(axes, x + 2.5, y, words, size=style.SMALL - 0.6, color=style.FAINT)
    return ring


def draw_sums(axes: Axes, rank: int) -> None:
    """Partial sums of a rank's tokens, where they arrive, and what becomes of them."""
    middle = CELL / 2
    for index, (token, chosen) in enumerate(TOKENS[rank].items()):
        y = token_y(rank, index)
        senders = sorted({rank_of(expert) for expert in chosen})
        for slot, sender in enumerate(senders):
            low = y + (0.0 if len(senders) == 1 else 1.35 - 2.7 * slot)
            cell(axes, X_SUMS, low, f"p{sender}({token})", token, width=6.2)
            local(axes, (X_SUMS + 6.2, low + middle), (X_RESULT, y + middle))
            outputs = [i for i, (_, t) in enumerate(rows_of(sender)) if t == token]
            start = sum(row_y(sender, i) for i in outputs) / len(outputs) + middle
            if len(outputs) > 1:
                for i in outputs:
                    local(axes, (X_OUTPUTS + 5.0, row_y(sender, i) + middle), (70.0, start))
                style.box(axes, 69.6, start - 1.0, 2.4, 2.0, style.COLORS["sum"], line=0.5)
                style.text(axes, 70.8, start, "+", size=style.FONT)
            first = (72.0 if len(outputs) > 1 else X_OUTPUTS + 5.0, start)
            last = (X_SUMS, low + middle)
            if sender == rank:
                local(axes, first, last)
            else:
                link(axes, first, last, token)
        cell(axes, X_RESULT, y, f"out({token})", token, width=6.4)


def draw() -> Figure:
    """The whole picture."""
    figure, axes = style.new_figure(6.0, rows=66.7)
    headings = (
        (10.0, "tokens x\n[T, H] per rank"),
        (29.5, "receive ring"),
        (45.5, "rows\n[M, H]"),
        (54.3, "grouped matmuls"),
        (63.5, "y\n[M, H]"),
        (83.1, "partial sums"),
        (95.6, "out\n[T, H]"),
    )
    for x, words in headings:
        style.text(axes, x, 60.2, words, size=style.SMALL, color=style.FAINT)
    bands = ((2.0, 49.6, "dispatch"), (50.2, 66.4, "grouped_mlp"), (67.0, 99.2, "combine"))
    for left, right, words in bands:
        style.box(axes, left, 62.7, right - left, 2.8, "#eef2f6", line=0.4)
        style.text(axes, (left + right) / 2, 64.1, words, bold=True)

    for rank, base in BASE.items():
        experts = f"experts {2 * rank}, {2 * rank + 1}"
        panel = (0.8, base - 0.9, 98.4, 23.4)
        style.box(axes, *panel, "#fafbfc", edge="#cbd2d9", line=0.6, panel=True)
        style.text(axes, 2.2, base + 20.9, f"rank {rank}", align="left", bold=True)
        style.text(
            axes, 8.4, base + 20.9, experts, size=style.SMALL, color=style.FAINT, align="left"
        )
    axes.plot([0.8, 99.2], [31.9, 31.9], color=style.FAINT, linewidth=0.8, linestyle=(0, (4, 3)))
    notes = (
        (9.0, "each token once per rank;\nroutes, weights and\ncounts to all ranks"),
        (84.5, "one partial sum\nper token and rank"),
    )
    for x, words in notes:
        style.text(axes, x, 31.9, words, size=style.SMALL, paper=True)
    style.text(axes, 54.3, 31.9, "NVLink", size=style.SMALL, color=style.FAINT, paper=True)

    rings = {rank: draw_rank(axes, rank) for rank in BASE}
    for rank in BASE:
        for index, token in enumerate(TOKENS[rank]):
            if token in rings[1 - rank]:
                start = (X_TOKENS + 14.6, token_y(rank, index) + CELL / 2)
                link(axes, start, (X_RING, rings[1 - rank][token] + CELL / 2), token)
        draw_sums(axes, rank)
    lines = (
        "Thick arrows cross NVLink; thin ones stay on a GPU. Rows are ordered by (local expert, "
        "source rank, token, k). M is static: unused rows are the tail.",
        "a2 has two experts on rank 1. It travels once, becomes two rows there, and one partial "
        "sum travels back.",
    )
    for index, words in enumerate(lines):
        style.text(axes, 1.5, 2.9 - 1.9 * index, words, size=style.SMALL, align="left")
    return figure
