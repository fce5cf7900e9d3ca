"""`python -m jax_ep.bench transfer`: calls chained in one program, and the evidence that they are in its loop."""

from __future__ import annotations

import unittest.mock

import testing  # isort: skip

import jax
import numpy as np
from absl.testing import absltest, parameterized
from transfers import problem_of

from jax_ep.bench import hlo, measure, timing, transfer_cases, transfer_problem
from jax_ep.bench.transfer_contenders import Ours
from jax_ep.bench.transfer_problem import start_sharded


class ChainTest(parameterized.TestCase):
    @parameterized.parameters(*transfer_cases.OPERATIONS)
    def test_calls_stay_in_the_loop(self, operation):
        problem = problem_of()
        transfer = Ours().transfer(operation, problem)
        arguments = Ours()._arguments(operation, problem)
        collective = "all-to-all" if operation == "combine" else "all-gather"
        started = start_sharded(transfer, arguments, problem.mesh, 5, collective)
        self.assertEqual(started.repeats, 5)
        with self.assertRaisesRegex(RuntimeError, r"no collective-permute .*\(in its loop\)"):
            start_sharded(transfer, arguments, problem.mesh, 5, "collective-permute")

    def test_calls_outside_the_loop_are_no_evidence(self):
        """As if the compiler had moved them out."""
        problem = problem_of()
        gather = lambda x: jax.lax.all_gather(x, "expert", tiled=True)
        moved_out = lambda transfer, calls: (
            lambda x: jax.lax.fori_loop(0, calls, lambda i, a: a * a, transfer(x))
        )
        with (
            unittest.mock.patch.object(transfer_problem, "chain", moved_out),
            self.assertRaisesRegex(RuntimeError, r"no all-gather .*\(in its loop\)"),
        ):
            start_sharded(gather, [(problem.sets[0].x,)], problem.mesh, 5, "all-gather")

    def test_as_many_calls_as_asked_for(self):
        calls = []

        def transfer(x):
            jax.debug.callback(lambda: calls.append(1))
            return jax.lax.all_gather(x, "expert", tiled=True)

        for chained in (1, 2, 20):
            calls.clear()
            problem = problem_of()
            arguments = [(operands.x,) for operands in problem.sets]
            started = start_sharded(transfer, arguments, problem.mesh, chained, "all-gather")
            result = started.call(arguments[1])
            jax.effects_barrier()
            self.assertLen(calls, 4 * chained)
            expected = np.tile(np.asarray(arguments[1][0]), (4, 1))
            testing.assert_bitwise(result, expected)

    def test_time_is_of_one_call(self):
        started = measure.Started(lambda x: x, [0], repeats=20)
        measurements = {}
        with unittest.mock.patch.object(timing, "device_times", lambda *_: [20.0, 40.0, 80.0]):
            measure.measure(measurements, "a", lambda: started, 3)
        times = {"median": 2.0, "minimum": 1.0, "maximum": 4.0, "iterations": 3}
        self.assertEqual(measurements["a"]["rounds"], [times])

    def test_what_loops_repeat(self):
        text = """HloModule m, is_scheduled=true

%sum (a: f32[]) -> f32[] {
  ROOT %r = f32[] all-reduce(%a)
}

%inner.1 (p: f32[4]) -> f32[4] {
  ROOT %g = (f32[4], f32[8]) all-gather-start(%p)
}

%step (p: f32[4]) -> f32[4] {
  %d = f32[8] all-gather-done(%g)
  ROOT %f = f32[4] fusion(%p), calls=%inner.1
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %c = f32[4] custom-call(%p), custom_call_target="jax_ep.combine.v1"
  %x = f32[4] all-to-all(%c), to_apply=%sum
  ROOT %w = f32[4] while(%x), condition=%until, body=%step
}
"""
        self.assertEqual(hlo.collectives(text), {"all-reduce": 1, "all-gather": 1, "all-to-all": 1})
        self.assertEqual(hlo.custom_calls(text), {"jax_ep.combine.v1": 1})
        self.assertEqual(hlo.collectives(hlo.loops(text)), {"all-gather": 1})


if __name__ == "__main__":
    absltest.main()
