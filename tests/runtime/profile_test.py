"""jax_ep.profile: reading records, traces, pictures, tables, and its errors. Records are made by hand here; kernels write them in
tests/cpp/emulation/transfer/profile_test.cc."""

from __future__ import annotations

import gzip
import json
import pathlib
import tempfile
import types
import unittest.mock

import jax
import numpy as np
from absl.testing import absltest

import jax_ep
from jax_ep import _ffi
from jax_ep._src.profile import profile as profile_module
from jax_ep._src.profile import records, summary, trace

NAMES = _ffi.profile_names()
KIND = {name: kind for kind, name in enumerate(NAMES["spans"]) if name}
KERNEL = NAMES["kernels"].index("DispatchKernel")
MATMUL = NAMES["kernels"].index("GroupedMatmulSwappedKernel")
CHUNK = 16
START = 1_700_000_000_000_000_000  # nanoseconds; more than 32 bits


class Recorder:
    """Writes records as kernels do: a warp's in chunks, a cycle per half a nanosecond."""

    def __init__(self):
        self.chunks: list[list[list[int]]] = []

    def warp(self, kernel, block, *, begin, end, spans, blocks=2, warp=0, sm=0, grid=7):
        """Times are nanoseconds since START, spans (name, start, end[, waited]) in the order of their ends."""
        track = CHUNK * len(self.chunks)

        def clock(time):
            return (
                2**32 - 500 + 2 * time + 1000 * sm
            ) % 2**32  # each SM has its clock, which wraps around

        def at(time):
            return [clock(time), (START + time) % 2**32, (START + time) >> 32]

        written = [
            [
                records.PLACE << 24 | track,
                kernel | warp << 8 | sm << 16,
                block | blocks << 16,
                grid,
            ],
            [records.BEGIN << 24 | track, *at(begin)],
            [records.END << 24 | track, *at(end)],
        ]
        for name, start, finish, *waited in spans:
            cycles = 2 * waited[0] if waited else 0
            written.append([KIND[name] << 24 | track, clock(start), clock(finish), cycles])
        for first in range(0, len(written), CHUNK):
            self.chunks.append(written[first : first + CHUNK])

    def read(self, num_lost=0):
        words = np.zeros((len(self.chunks), CHUNK, 4), np.uint32)
        for chunk, written in zip(words, self.chunks, strict=True):
            chunk[: len(written)] = written
        return records.read([(3, words.tobytes(), num_lost)], NAMES)[0]


def two_launches():
    """Two launches of a dispatch of two blocks, and one of a matmul."""
    recorder = Recorder()
    for launch in range(2):
        for block in range(2):
            begin = 10_000 * launch + 100 * block
            spans = [
                ("wait for entry", begin + 100, begin + 1100),
                ("wait for a chunk", begin + 2000, begin + 2500),
                ("expand tokens", begin + 1500, begin + 4500),
            ]
            recorder.warp(KERNEL, block, begin=begin, end=begin + 5000, spans=spans, sm=block)
    tiles = [("multiply", 20_000 + 100 * i, 20_090 + 100 * i, 30) for i in range(40)]
    recorder.warp(MATMUL, 0, begin=20_000, end=24_000, spans=tiles, blocks=1, warp=4)
    return recorder


def make_folder(test):
    return pathlib.Path(test.enterContext(tempfile.TemporaryDirectory()))


class ReadTest(absltest.TestCase):
    def test_launches(self):
        launches = two_launches().read().launches
        self.assertEqual(
            [(x.kernel, x.num_blocks, len(x.tracks)) for x in launches],
            [
                ("DispatchKernel", 2, 2),
                ("DispatchKernel", 2, 2),
                ("GroupedMatmulSwappedKernel", 1, 1),
            ],
        )
        self.assertEqual([x.end - x.start for x in launches], [5100, 5100, 4000])

    def test_launches_at_the_same_time_differ_by_their_grid(self):
        recorder = Recorder()
        for grid in (1, 2):
            for block in range(2):
                recorder.warp(KERNEL, block, begin=grid + 10 * block, end=900, spans=[], grid=grid)
        launches = recorder.read().launches
        self.assertEqual([[t.block for t in x.tracks] for x in launches], [[0, 1], [0, 1]])

    def test_spans_are_nested_and_in_time(self):
        launch = two_launches().read().launches[0]
        (track,) = (t for t in launch.tracks if t.block == 1)
        spans = [(s.name, s.start, s.end, s.depth, s.own) for s in track.spans]
        self.assertEqual(
            [s[0] for s in spans], ["wait for entry", "expand tokens", "wait for a chunk"]
        )
        expected = [(200, 1200, 0, 1000), (1600, 4600, 0, 2500), (2100, 2600, 1, 500)]
        np.testing.assert_allclose([s[1:] for s in spans], expected, atol=1e-6)

    def test_short_waits_are_not_the_spans_own(self):
        (span, *others) = two_launches().read().launches[2].tracks[0].spans
        self.assertLen(others, 39)
        self.assertEqual((span.name, span.waits_for), ("multiply", "wait for a full stage"))
        self.assertAlmostEqual(span.waited, 30)
        self.assertAlmostEqual(span.own, 60)

    def test_a_warp_that_has_not_ended_is_left_out(self):
        recorder = two_launches()
        recorder.chunks[3][2] = [0, 0, 0, 0]  # the end of a warp of the second dispatch
        self.assertEqual([len(x.tracks) for x in recorder.read().launches], [2, 1, 1])

    def test_a_launch_within_one_step_of_the_timer(self):
        recorder = Recorder()
        recorder.warp(KERNEL, 0, begin=5, end=5, spans=[("wait for entry", 1, 3)])
        (launch,) = recorder.read().launches
        self.assertTrue(np.isfinite(launch.end) and launch.tracks[0].spans)

    def test_nothing(self):
        self.assertEmpty(records.read([(0, b"", 0)], NAMES)[0].launches)


class TraceTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.path = make_folder(self) / "trace.json.gz"

    def events(self, device):
        trace.write_trace(self.path, [device])
        return json.loads(gzip.decompress(self.path.read_bytes()))["traceEvents"]

    def test_slices_of_a_row_are_nested(self):
        rows = {}
        for event in self.events(two_launches().read()):
            if event["ph"] == "X":
                rows.setdefault(event["tid"], []).append(event)
        self.assertLen(rows, 3)  # two SMs, and another warp
        for row in rows.values():
            open_until = []
            for event in sorted(row, key=lambda e: (e["ts"], -e["dur"])):
                start, end = event["ts"], event["ts"] + event["dur"]
                while open_until and open_until[-1] <= start + 1e-6:
                    open_until.pop()
                self.assertTrue(not open_until or end <= open_until[-1] + 1e-6, event)
                self.assertEqual(event["cat"] == "kernel", not open_until, event)
                open_until.append(end)

    def test_times_are_microseconds_since_the_first_launch(self):
        slices = [e for e in self.events(two_launches().read()) if e.get("cat") == "kernel"]
        self.assertEqual({e["pid"] for e in slices}, {3})
        np.testing.assert_allclose([e["ts"] for e in slices], [0, 0.1, 10, 10.1, 20], atol=1e-9)
        np.testing.assert_allclose([e["dur"] for e in slices], [5, 5, 5, 5, 4], atol=1e-9)
        self.assertEqual(
            slices[1]["args"], {"launch": 0, "block": 1, "blocks": 2, "warp": 0, "sm": 1}
        )

    def test_blocks_that_share_an_sm_have_rows_of_their_own(self):
        recorder = Recorder()
        for block in range(2):
            recorder.warp(KERNEL, block, begin=10 * block, end=2000, spans=[])
        names = [
            e["args"]["name"] for e in self.events(recorder.read()) if e["name"] == "thread_name"
        ]
        self.assertEqual(names, ["SM 0 warp 0", "SM 0 warp 0 (2)"])


class SummaryTest(absltest.TestCase):
    def test_shares(self):
        self.assertEqual(
            summary.summarize([two_launches().read()]).splitlines(),
            [
                "GPU 3, DispatchKernel: 2 launches, mean 5.1 us",
                "  warp 0   expand tokens 50%, wait for entry 20%, other 20%, wait for a chunk 10%",
                "GPU 3, GroupedMatmulSwappedKernel: 1 launch, mean 4.0 us",
                "  warp 4   multiply 60%, wait for a full stage 30%, other 10%",
            ],
        )

    def test_lost_spans(self):
        self.assertIn("no room for 5 spans", summary.summarize([two_launches().read(5)]))

    def test_nothing(self):
        self.assertIn("Block on results", summary.summarize([Recorder().read()]))


class ProfileTest(absltest.TestCase):
    """The context, with the compiled module replaced."""

    def module(self, **changes):
        recorder = two_launches()
        words = np.zeros((len(recorder.chunks), CHUNK, 4), np.uint32)
        for chunk, written in zip(words, recorder.chunks, strict=True):
            chunk[: len(written)] = written
        functions = {
            "build_info": lambda: {"profile": True},
            "profile_names": lambda: NAMES,
            "start_profile": unittest.mock.Mock(return_value=""),
            "stop_profile": unittest.mock.Mock(return_value=("", [(0, words.tobytes(), 0)])),
        }
        return types.SimpleNamespace(**(functions | changes))

    def enter(self, module, devices=(types.SimpleNamespace(local_hardware_id=5),)):
        patches = (
            unittest.mock.patch.object(profile_module, "_ffi", module),
            unittest.mock.patch.object(jax, "local_devices", lambda backend: devices),
        )
        for patch in patches:
            self.enter_context(patch)

    def test_files(self):
        module = self.module()
        self.enter(module)
        folder = make_folder(self) / "new" / "folder"
        with jax_ep.profile(folder, max_records=64) as profile:
            module.start_profile.assert_called_once_with([5], 64, False)
            self.assertFalse(profile.trace.exists())
        self.assertEqual(profile.trace, folder / "trace_0.json.gz")
        self.assertLen(
            [
                e
                for e in json.loads(gzip.decompress(profile.trace.read_bytes()))["traceEvents"]
                if e.get("cat") == "kernel"
            ],
            5,
        )
        self.assertEqual(profile.picture, folder / "picture_0.png")
        self.assertEqual(profile.picture.read_bytes()[:8], b"\x89PNG\r\n\x1a\n")
        self.assertEqual(str(profile), profile.summary())
        self.assertIn("DispatchKernel", str(profile))
        with jax_ep.profile(folder) as again:  # the old picture is not taken for the new one
            self.assertFalse((folder / "picture_0.png").exists())
        self.assertEqual(again.trace, profile.trace)

    def test_an_exception_ends_the_recording(self):
        module = self.module()
        self.enter(module)
        with self.assertRaisesRegex(ValueError, "own"), jax_ep.profile(make_folder(self)):
            raise ValueError("own")
        module.stop_profile.assert_called_once_with()

    def test_a_failed_gpu(self):
        self.enter(self.module(stop_profile=lambda: ("jax_ep: GPU 0: it failed", [])))
        with self.assertRaisesRegex(jax_ep.Error, "it failed"), jax_ep.profile(make_folder(self)):
            pass

    def test_this_build_has_names_for_all_numbers(self):
        self.assertEqual(len(NAMES["spans"]), len(NAMES["waits"]))
        self.assertEqual(NAMES["spans"][: records.END + 1], [""] * 4)
        self.assertTrue(all(NAMES["spans"][records.END + 1 :]))
        self.assertFalse(jax_ep.build_info()["profile"])


if __name__ == "__main__":
    absltest.main()
