"""How `python -m jax_ep.bench` times calls: in bursts, after a warm-up."""

from __future__ import annotations

import unittest.mock

import numpy as np
from absl.testing import absltest, parameterized

from jax_ep.bench.common import timing


class TimingTest(parameterized.TestCase):
    def test_bursts(self):
        """Argument sets in turn; one burst always ahead of the one that is waited for."""
        calls, waited, ahead = [], [], []

        def completion(result):
            ahead.append(len(ahead) - len(waited))
            return lambda: waited.append(result)

        with unittest.mock.patch.multiple(timing, WARM_UP_SECONDS=0, BURST_SECONDS=0):
            seconds = timing.device_times(lambda x: calls.append(x) or x, ["a", "b"], 5, completion)
        self.assertLen(seconds, 5)
        self.assertEqual(calls, (["a", "b"] * len(calls))[: len(calls)])
        self.assertEqual(ahead[4:], [0] + [1] * (len(ahead) - 5))
        self.assertLen(waited, len(ahead))

    @parameterized.product(
        (
            {"warm_up_seconds": None, "is_settled": True},  # WARM_UP_SECONDS, here a second, too
            {"warm_up_seconds": 1.0, "is_settled": True},
            {"warm_up_seconds": 0, "is_settled": False},
        ),
        long_call_seconds=(1, 0),  # all calls are short, all are long
    )
    def test_warm_up_is_not_timed(self, warm_up_seconds, is_settled, long_call_seconds):
        """Times by a clock that calls move: by 50 ms until a second has passed, by 25 ms then."""
        now = 0.0

        def wait():
            nonlocal now
            now += 0.05 if now < 1 else 0.025

        with (
            unittest.mock.patch.multiple(
                timing, WARM_UP_SECONDS=1.0, BURST_SECONDS=0, LONG_CALL_SECONDS=long_call_seconds
            ),
            unittest.mock.patch.object(timing.time, "perf_counter", lambda: now),
        ):
            seconds = timing.device_times(lambda x: x, [1], 3, lambda _: wait, warm_up_seconds)
        np.testing.assert_allclose(seconds, [0.025 if is_settled else 0.05] * 3)

    def test_long_calls_are_repeated_less_and_never_two_at_once(self):
        running, most = [], []

        def completion(result):
            most.append(len(running))
            return running.clear

        with unittest.mock.patch.multiple(timing, WARM_UP_SECONDS=0, LONG_CALL_SECONDS=0):
            seconds = timing.device_times(running.append, [1], 50, completion)
        self.assertLen(seconds, timing.LONG_CALL_ITERATIONS)
        self.assertEqual(set(most), {1})


if __name__ == "__main__":
    absltest.main()
