"""`python -m jax_ep.bench ... --energy`: joules and watts by NVML's counters, here a fake of it."""

from __future__ import annotations

import os
import sys
import types
import unittest.mock

import testing  # isort: skip  # noqa: F401  sets the devices

from absl.testing import absltest, parameterized
from bench_command import run, smoke

from jax_ep.bench.common import energy
from jax_ep.bench.common.benchmark import Started


class Clock:
    """Seconds that only calls and sleeping move; boards that take 100 W at rest, 600 W in calls."""

    def __init__(self):
        self.now, self.joules, self.calls = 0.0, 0.0, 0

    def sleep(self, seconds):
        self.now += seconds
        self.joules += 100 * seconds

    def call(self, x):
        self.calls += 1
        self.now += 0.002
        self.joules += 600 * 0.002
        return x

    def patched(self):
        clock = types.SimpleNamespace(sleep=self.sleep, perf_counter=lambda: self.now)
        return unittest.mock.patch.object(energy, "time", clock)


def fake_nvml(millijoules, visible=None):
    """Patches pynvml by boards whose counters are a function; says which were asked for."""
    asked = []
    nvml = types.SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: asked.append(index) or index,
        nvmlDeviceGetHandleByUUID=lambda name: asked.append(name) or name,
        nvmlDeviceGetTotalEnergyConsumption=lambda _: millijoules(),
    )
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return asked, unittest.mock.patch.dict(sys.modules, pynvml=nvml), environment


class BoardsTest(parameterized.TestCase):
    @parameterized.parameters(
        (None, 2, [0, 1]), ("3,1", 2, [3, 1]), ("GPU-a, GPU-b", 1, ["GPU-a"]), ("", 1, [0])
    )
    def test_boards_are_those_of_jax(self, visible, count, expected):
        asked, patch, environment = fake_nvml(lambda: 0, visible)
        with patch, unittest.mock.patch.dict(os.environ, environment):
            if visible is None:
                os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            energy.Boards(count)
        self.assertEqual(asked, expected)

    @parameterized.parameters((1, 1), (2, 1), (1, 4))
    def test_joules_of_a_call(self, boards, repeats):
        """Counts all boards, without the pauses between phases; watts are of one of them."""
        clock = Clock()
        _, patch, environment = fake_nvml(lambda: clock.joules * 1e3)
        with patch, clock.patched(), unittest.mock.patch.dict(os.environ, environment):
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            started = Started(clock.call, [1, 2], lambda _: lambda: None, repeats=repeats)
            found = energy.Boards(boards).measure(started, 1.0)
        self.assertAlmostEqual(found.joules, 1.2 * boards / repeats)
        self.assertAlmostEqual(found.watts, 600)
        self.assertLen(found.phases, energy.PHASES)
        self.assertGreaterEqual(clock.calls * 0.002, energy.PHASES)

    def test_idle_watts(self):
        clock = Clock()
        _, patch, _ = fake_nvml(lambda: clock.joules * 1e3)
        with patch, clock.patched():
            self.assertAlmostEqual(energy.Boards(2).idle_watts(), 100)
        self.assertEqual(clock.now, 2 * energy.IDLE_SECONDS)

    def test_the_device_is_never_idle(self):
        """A burst is enqueued before the last one is waited for; all calls are counted."""
        enqueued, waited = [], []

        def completion(result):
            return lambda: waited.append((result, len(enqueued)))

        done = energy.repeat(lambda x: enqueued.append(x) or len(enqueued), [7], 0.02, completion)
        self.assertLen(enqueued, done)
        self.assertEqual(waited[-1][0], done)
        for last, at in waited[1:-1]:
            self.assertGreater(at, last)


class CommandTest(parameterized.TestCase):
    def test_matmul(self):
        """The report has joules and watts of all that was timed, and of the board at rest."""
        counter = iter(range(0, 10**9, 500))
        _, patch, _ = fake_nvml(lambda: next(counter))
        arguments = "--provider=jax_ep", "--operation=forward", "--shape=96,32,64,3", "--energy=1"
        with patch, unittest.mock.patch.multiple(energy, PHASES=1, IDLE_SECONDS=0.01):
            status, output, results = smoke("matmul", *arguments)
        self.assertEqual(status, 0)
        self.assertIn("W per GPU", output)
        self.assertGreater(results["idle_watts"], 0)
        (record, *_) = results["cases"]
        measurement = record["measurements"]["jax_ep"]
        self.assertEqual(measurement["joules"], measurement["energy"]["joules"])
        self.assertGreater(measurement["watts"], 0)

    def test_without_the_counters(self):
        """The error says what to install."""
        with unittest.mock.patch.dict(sys.modules, pynvml=None):
            status, output = run("matmul", "--smoke", "--energy=1", "--provider=jax_ep")
        self.assertEqual(status, 2)
        self.assertIn("pip install jax_ep[bench]", output)

    def test_transfers_have_no_such_option(self):
        with self.assertRaises(SystemExit):
            run("transfer", "--smoke", "--energy=1")


if __name__ == "__main__":
    absltest.main()
