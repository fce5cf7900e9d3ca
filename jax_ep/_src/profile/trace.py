"""Writes profiles as a trace in Chrome's JSON format, which Perfetto opens."""

from __future__ import annotations

import gzip
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from jax_ep._src.profile.records import Device, Launch, Track


def write_trace(path: pathlib.Path, devices: Sequence[Device]) -> None:
    """Writes a process for each GPU, and in it a row for each recording warp of an SM."""
    trace = {
        "traceEvents": [event for device in devices for event in _events(device)],
        "displayTimeUnit": "ns",
        "otherData": {"origin_ns": min((device.origin for device in devices), default=0)},
    }
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.write(json.dumps(trace, separators=(",", ":")))  # json.dump takes twice as long


def _events(device: Device) -> Iterator[dict[str, Any]]:
    pid = device.ordinal
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"GPU {pid}"}}
    rows = _Rows()
    for number, launch in enumerate(device.launches):
        for track in sorted(launch.tracks, key=lambda track: track.start):
            tid = rows.place(track)
            yield from _slices(launch, number, track, pid, tid)
    for tid, name in rows.names.items():
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
        yield {
            "ph": "M",
            "pid": pid,
            "tid": tid,
            "name": "thread_sort_index",
            "args": {"sort_index": tid},
        }


def _slices(
    launch: Launch, number: int, track: Track, pid: int, tid: int
) -> Iterator[dict[str, Any]]:
    """Yields the slice of the kernel, and the spans inside."""

    def slice_of(name: str, category: str, start: float, end: float, **args: Any) -> dict[str, Any]:
        # Microseconds. Durations are differences of rounded times: rounded slices are nested, too.
        at = round(start / 1000, 3)
        duration = round(round(end / 1000, 3) - at, 3)
        return {
            "ph": "X",
            "pid": pid,
            "tid": tid,
            "name": name,
            "cat": category,
            "ts": at,
            "dur": duration,
            "args": args,
        }

    yield slice_of(
        launch.kernel,
        "kernel",
        track.start,
        track.end,
        launch=number,
        block=track.block,
        blocks=launch.num_blocks,
        warp=track.warp,
        sm=track.sm,
    )
    for span in track.spans:
        args = {span.waits_for: f"{span.waited / 1000:.3f} us"} if span.waits_for else {}
        category = "wait" if span.name.startswith("wait") else "work"
        yield slice_of(span.name, category, span.start, span.end, **args)


class _Rows:
    """The rows of a GPU: of each SM's warps, as many as run at the same time."""

    _MAX_WARPS = 64  # at the same time on an SM

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self._ends: dict[int, float] = {}

    def place(self, track: Track) -> int:
        """Returns the row of a track. Tracks come in the order of their starts, by launch."""
        row = 0
        while self._ends.get(tid := self._tid(track, row), track.start) > track.start:
            row += 1
        self._ends[tid] = track.end
        self.names[tid] = f"SM {track.sm} warp {track.warp}" + (f" ({row + 1})" if row else "")
        return tid

    def _tid(self, track: Track, row: int) -> int:
        return 1 + (track.sm * self._MAX_WARPS + track.warp) * self._MAX_WARPS + row
