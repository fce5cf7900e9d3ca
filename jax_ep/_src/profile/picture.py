"""Draws profiles: the blocks of a launch over time, colored by what they did."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jax_ep._src.profile.records import Device, Launch

_WORK = ("#a9cdf5", "#b5e2c0", "#fbd9a5", "#d9c8f0", "#c9d3dd", "#b7e4e4", "#e5d3b3", "#cfe3a0")
_WAITS = ("#d64550", "#f0883e", "#b5179e", "#7f1d1d", "#e57399", "#a0522d", "#ff9da7", "#8c564b")
_NOTHING = "#eef1f4"  # a warp runs, and records no span


def draw(path: pathlib.Path, devices: Sequence[Device]) -> None:
    """Writes a PNG with the last launch of each kernel, of the first GPU that ran it."""
    launches: dict[str, tuple[int, Launch]] = {}
    for device in reversed(devices):
        for launch in device.launches:
            launches[launch.kernel] = (device.ordinal, launch)
    figure = Figure(figsize=(11, 0.6 + 3.4 * max(len(launches), 1)), layout="constrained")
    axes = figure.subplots(max(len(launches), 1), squeeze=False)[:, 0]
    for axis, (ordinal, launch) in zip(axes, launches.values(), strict=False):
        _draw_launch(axis, ordinal, launch)
    FigureCanvasAgg(figure).print_png(str(path))


def _draw_launch(axis: Axes, ordinal: int, launch: Launch) -> None:
    tracks = sorted(launch.tracks, key=lambda track: (track.warp, track.block))
    names = {span.name for track in tracks for span in track.spans}
    colors = {
        name: palette[i % len(palette)]
        for palette, is_wait in ((_WORK, False), (_WAITS, True))
        for i, name in enumerate(sorted(n for n in names if n.startswith("wait") == is_wait))
    }
    boxes, fills = [], []
    for row, track in enumerate(tracks):
        spans = [(track.start, track.end, _NOTHING)]
        spans += [(span.start, span.end, colors[span.name]) for span in track.spans]
        for start, end, color in spans:  # inner ones last, on top
            left, right = (start - launch.start) / 1000, (end - launch.start) / 1000
            boxes.append([(left, row), (right, row), (right, row + 1), (left, row + 1)])
            fills.append(color)
    axis.add_collection(PolyCollection(boxes, facecolors=fills, linewidths=0))
    axis.set_xlim(0, max((launch.end - launch.start) / 1000, 1e-3))
    axis.set_ylim(len(tracks), 0)
    warps = sorted({track.warp for track in tracks})
    first_rows = [next(i for i, track in enumerate(tracks) if track.warp == w) for w in warps]
    axis.set_yticks(first_rows, [f"warp {warp}" for warp in warps])
    axis.set_title(f"{launch.kernel}, GPU {ordinal}: {launch.num_blocks} blocks", loc="left")
    axis.set_xlabel("microseconds")
    axis.legend(
        handles=[Patch(color=color, label=name) for name, color in colors.items()],
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        fontsize="small",
        frameon=False,
    )
