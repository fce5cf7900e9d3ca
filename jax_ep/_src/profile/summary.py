"""A table of what the warps of kernels spent their time with."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from jax_ep._src.profile.records import Device, Launch, Track

_MIN_SHARE = 0.005  # smaller shares are left out


def summarize(devices: Sequence[Device]) -> str:
    """Returns a line for each kernel of a GPU, and below it one for each warp of its blocks.

    Shares are of the warp's time in all blocks. Spans and waits inside a span are not the span's.
    """
    lines: list[str] = []
    for device in devices:
        by_kernel: dict[str, list[Launch]] = collections.defaultdict(list)
        for launch in device.launches:
            by_kernel[launch.kernel].append(launch)
        for kernel, launches in sorted(by_kernel.items()):
            mean = sum(launch.end - launch.start for launch in launches) / len(launches) / 1000
            calls = "1 launch" if len(launches) == 1 else f"{len(launches)} launches"
            lines.append(f"GPU {device.ordinal}, {kernel}: {calls}, mean {mean:.1f} us")
            by_warp: dict[int, list[Track]] = collections.defaultdict(list)
            for launch in launches:
                for track in launch.tracks:
                    by_warp[track.warp].append(track)
            for warp, tracks in sorted(by_warp.items()):
                lines.append(f"  warp {warp:<2}  {', '.join(_shares(tracks))}")
    if not lines:
        lines.append(
            "Nothing is recorded: no kernel that records has run to its end. Block on results "
            "inside the context."
        )
    for device in devices:
        if device.num_lost:
            lines.append(
                f"GPU {device.ordinal}: there was no room for {device.num_lost} spans; expected "
                "room for all. Give a larger max_records, or profile fewer calls."
            )
    return "\n".join(lines)


def _shares(tracks: Sequence[Track]) -> list[str]:
    times: dict[str, float] = collections.defaultdict(float)
    for track in tracks:
        for span in track.spans:
            times[span.name] += span.own
            if span.waits_for:
                times[span.waits_for] += span.waited
    total = sum(track.end - track.start for track in tracks)
    times["other"] = total - sum(times.values())
    largest = sorted(times.items(), key=lambda item: -item[1])
    return [f"{name} {time / total:.0%}" for name, time in largest if time > _MIN_SHARE * total]
