"""Draws the figures of docs/design: ``python docs/figures/draw.py [--out FOLDER] [NAME ...]``."""

from __future__ import annotations

import argparse
import io
import pathlib
from collections.abc import Callable

import matmul_timeline
import matplotlib.pyplot as plt
import moe_layer
import style
import transfer_timelines
from matplotlib.figure import Figure
from PIL import Image

IMAGES = pathlib.Path(__file__).resolve().parents[1] / "images"

FIGURES: dict[str, Callable[[], Figure]] = {
    "moe_layer": moe_layer.draw,
    "dispatch_timeline": transfer_timelines.dispatch,
    "redispatch_timeline": transfer_timelines.redispatch,
    "combine_timeline": transfer_timelines.combine,
    "low_latency_dispatch_timeline": transfer_timelines.low_latency_dispatch,
    "low_latency_redispatch_timeline": transfer_timelines.low_latency_redispatch,
    "low_latency_combine_timeline": transfer_timelines.low_latency_combine,
    "grouped_matmul_timeline": matmul_timeline.draw,
}


def write(figure: Figure, path: pathlib.Path) -> None:
    """Saves `figure` as a PNG of few colors, a third of the bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=style.DPI, format="png")
    plt.close(figure)
    colors = Image.open(buffer).convert("RGB").quantize(64, dither=Image.Dither.NONE)
    colors.save(path, optimize=True)


def main() -> None:
    """Writes one PNG per name, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=IMAGES)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(FIGURES))
    options = parser.parse_args()
    unknown = set(options.names) - set(FIGURES)
    if unknown:
        parser.error(f"no figure is called {', '.join(sorted(unknown))}")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or FIGURES:
        figure = FIGURES[name]()
        write(figure, options.out / f"{name}.png")


if __name__ == "__main__":
    main()
