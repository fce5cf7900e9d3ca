"""Reads what kernels have recorded (ffi/device/profile/events.h): launches, tracks, spans."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

PLACE, BEGIN, END = 1, 2, 3  # SpanKind: the records of a track itself
_TRACK_BITS = 24
_CLOCK = 1 << 32  # a clock's values


@dataclasses.dataclass(frozen=True)
class Span:
    """A span of time of a warp, in nanoseconds since the origin.

    Attributes:
      name: what the warp did or waited for.
      start: when it began.
      end: when it ended.
      depth: 0 for spans that no other span contains.
      own: the duration without the spans inside and without `waited`.
      waited: short waits that the span adds up.
      waits_for: what these waits are for.
    """

    name: str
    start: float
    end: float
    depth: int
    own: float
    waited: float
    waits_for: str


@dataclasses.dataclass(frozen=True)
class Track:
    """A warp's spans in one launch, outer ones before those inside."""

    block: int
    warp: int
    sm: int
    start: float
    end: float
    spans: Sequence[Span]


@dataclasses.dataclass(frozen=True)
class Launch:
    """A launch of a kernel."""

    kernel: str
    num_blocks: int
    tracks: Sequence[Track]

    @property
    def start(self) -> float:
        """The time at which the first block began."""
        return min(track.start for track in self.tracks)

    @property
    def end(self) -> float:
        """The time at which the last block ended."""
        return max(track.end for track in self.tracks)


@dataclasses.dataclass(frozen=True)
class Device:
    """The profile of a GPU.

    Attributes:
      ordinal: the GPU's.
      origin: the time 0 of all launches, in nanoseconds of the GPUs' timers.
      launches: in the order of their starts.
      num_lost: spans for which there was no room.
    """

    ordinal: int
    origin: int
    launches: Sequence[Launch]
    num_lost: int


@dataclasses.dataclass
class _Warp:
    """A track as it was recorded: clocks are 32 bits, times nanoseconds."""

    kernel: int
    warp: int
    sm: int
    block: int
    num_blocks: int
    grid: int
    begin_clock: int
    begin_time: int
    end_clock: int
    end_time: int
    spans: list[tuple[int, int, int, int]]  # kind, start, end, waited; in the order of ends


def read(recorded: Sequence[tuple[int, bytes, int]], names: dict[str, list[str]]) -> list[Device]:
    """Reads the records of GPUs: their ordinals, records, and numbers of lost spans.

    Times are relative to the begin of the first warp, because floats are not exact enough for those
    of the timer. `names` are `_ffi.profile_names()`.
    """
    warps = [_warps(records) for _, records, _ in recorded]
    origin = min((warp.begin_time for of_device in warps for warp in of_device), default=0)
    devices = []
    for (ordinal, _, num_lost), of_device in zip(recorded, warps, strict=True):
        for warp in of_device:
            warp.begin_time -= origin
            warp.end_time -= origin
        launches = [_launch(of_launch, names) for of_launch in _launches(of_device)]
        launches.sort(key=lambda launch: launch.start)
        devices.append(Device(ordinal, origin, launches, num_lost))
    return devices


def _warps(records: bytes) -> list[_Warp]:
    """Returns the warps that recorded where they ran, and when they began and ended."""
    words = np.frombuffer(records, np.uint32).reshape(-1, 4)
    kinds, tracks = words[:, 0] >> _TRACK_BITS, words[:, 0] & ((1 << _TRACK_BITS) - 1)
    parts: dict[int, dict[int, list[int]]] = {}
    for kind in (PLACE, BEGIN, END):
        mask = kinds == kind
        parts[kind] = dict(zip(tracks[mask].tolist(), words[mask, 1:].tolist(), strict=True))
    warps = {}
    for track, (place, blocks, grid) in parts[PLACE].items():
        if track not in parts[BEGIN] or track not in parts[END]:
            continue  # the kernel still runs
        begin, end = parts[BEGIN][track], parts[END][track]
        warps[track] = _Warp(
            kernel=place & 0xFF,
            warp=place >> 8 & 0xFF,
            sm=place >> 16,
            block=blocks & 0xFFFF,
            num_blocks=blocks >> 16,
            grid=grid,
            begin_clock=begin[0],
            begin_time=begin[1] | begin[2] << 32,
            end_clock=end[0],
            end_time=end[1] | end[2] << 32,
            spans=[],
        )
    # Chunks of a track are reserved one after another, so records are in order.
    mask = kinds > END
    spans = words[mask, 1:].tolist()
    for kind, track, span in zip(kinds[mask].tolist(), tracks[mask].tolist(), spans, strict=True):
        if track in warps:
            warps[track].spans.append((kind, *span))
    return list(warps.values())


def _launches(warps: list[_Warp]) -> list[list[_Warp]]:
    """Groups the warps of each launch.

    A block runs once in a launch. So a launch of a grid has ended where a warp of a block appears
    again.
    """
    launches: list[list[_Warp]] = []
    latest: dict[tuple[int, int, int], tuple[list[_Warp], set[tuple[int, int]]]] = {}
    for warp in sorted(warps, key=lambda warp: warp.begin_time):
        grid, place = (warp.kernel, warp.num_blocks, warp.grid), (warp.block, warp.warp)
        if grid not in latest or place in latest[grid][1]:
            launches.append([])
            latest[grid] = (launches[-1], set())
        latest[grid][0].append(warp)
        latest[grid][1].add(place)
    return launches


def _launch(warps: list[_Warp], names: dict[str, list[str]]) -> Launch:
    """Turns clocks into times.

    A warp's clock is scaled to the time between its begin and its end, so that the tracks of
    launches that follow each other do not overlap. The timer advances in steps: a warp that ran for
    less than one has the rate of the others.
    """
    passed = [(warp, warp.end_time - warp.begin_time) for warp in warps]
    rates = [_cycles(warp, warp.end_clock) / time for warp, time in passed if time > 0]
    usual = float(np.median(rates)) if rates else 1.0
    tracks = []
    for warp, time in passed:
        rate = _cycles(warp, warp.end_clock) / time if time > 0 else usual
        tracks.append(_track(warp, rate or 1.0, names))
    return Launch(names["kernels"][warps[0].kernel], warps[0].num_blocks, tracks)


def _cycles(warp: _Warp, clock: int) -> int:
    """Returns the cycles since the warp's begin."""
    return (clock - warp.begin_clock) % _CLOCK


def _track(warp: _Warp, rate: float, names: dict[str, list[str]]) -> Track:
    def time(clock: int) -> float:
        return warp.begin_time + _cycles(warp, clock) / rate

    # Outer spans first: they start earlier, and are recorded later.
    order = sorted(
        range(len(warp.spans)),
        key=lambda i: (_cycles(warp, warp.spans[i][1]), -i),
    )
    fields: list[dict[str, Any]] = []
    outer: list[int] = []
    for i in order:
        kind, start_clock, end_clock, waited = warp.spans[i]
        start, end = time(start_clock), time(end_clock)
        while outer and fields[outer[-1]]["end"] <= start:
            outer.pop()
        if outer:
            fields[outer[-1]]["own"] -= end - start
        fields.append(
            {
                "name": names["spans"][kind],
                "start": start,
                "end": end,
                "depth": len(outer),
                "own": end - start - waited / rate,
                "waited": waited / rate,
                "waits_for": names["waits"][kind],
            }
        )
        outer.append(len(fields) - 1)
    return Track(
        block=warp.block,
        warp=warp.warp,
        sm=warp.sm,
        start=float(warp.begin_time),
        end=time(warp.end_clock),
        spans=[Span(**of_span) for of_span in fields],
    )
