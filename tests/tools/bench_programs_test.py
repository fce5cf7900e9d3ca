"""Programs of `python -m jax_ep.bench`: chained calls, all of which are in the program."""

from __future__ import annotations

import collections
import re
import unittest.mock

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from bench_command import transfer_problem_of

from jax_ep._src.core.chain import chain, in_turn
from jax_ep._src.transfer import reference
from jax_ep.bench.common import programs
from jax_ep.bench.common.programs import sharded, start_jax, start_sharded
from jax_ep.bench.transfer.providers import OPERATIONS, Ours


class ProgramsTest(parameterized.TestCase):
    @parameterized.product(chained=(7, 1, 2), operation=OPERATIONS)
    def test_all_calls_are_in_the_program(self, operation, chained):
        problem = transfer_problem_of()
        transfer = Ours().transfers(problem, None)[operation]
        arguments = Ours().arguments(operation, problem)
        collective = "all-to-all" if operation == "combine" else "all-gather"
        # Else small values are gathered.
        self.enter_context(unittest.mock.patch.object(reference, "MOST_GATHERED_BYTES", 0))
        alone = start_sharded(transfer, arguments, problem.mesh, 1, None)
        started = start_sharded(transfer, arguments, problem.mesh, chained, None)
        self.assertEqual(started.repeats, chained)
        # The pure-JAX dispatch gathers more than x, but that does not depend on x: once for all.
        once = alone.facts["collectives"][collective] - 1
        self.assertEqual(started.facts["collectives"][collective], once + chained)

    def test_nothing_is_between_calls(self):
        """Nor are they merged, though their arguments are the same and nobody reads their results."""
        problem = transfer_problem_of()
        gather = lambda x: jax.lax.all_gather(x, "expert", tiled=True)
        x = jax.ShapeDtypeStruct((36, 16), np.float32)  # XLA:CPU would convert bfloat16
        program = jax.jit(sharded(chain(gather, 5), problem.mesh)).lower(x)
        disabled = {"xla_disable_hlo_passes": "cse_barrier_expander"}
        text = program.compile(compiler_options=disabled).as_text()
        operations = collections.Counter(re.findall(r"^ .* = .*? ([\w-]+)\(", text, re.MULTILINE))
        free = {"parameter", "tuple", "get-tuple-element", "opt-barrier"}
        self.assertEqual({o: n for o, n in operations.items() if o not in free}, {"all-gather": 5})

    def test_fewer_or_more_calls_are_no_evidence(self):
        problem = transfer_problem_of()
        gather = lambda x: jax.lax.all_gather(x, "expert", tiled=True)
        twice = lambda x: jax.lax.all_gather(gather(x), "expert")
        arguments = [(problem.sets[0].x,)]
        start_sharded(gather, arguments, problem.mesh, 5, "all-gather")
        with self.assertRaisesRegex(RuntimeError, "have all-gather 5 times, but has .*: 10}"):
            start_sharded(twice, arguments, problem.mesh, 5, "all-gather")
        with self.assertRaisesRegex(RuntimeError, "have all-to-all 5 times, but has"):
            start_sharded(gather, arguments, problem.mesh, 5, "all-to-all")
        merged = unittest.mock.patch.object(programs, "chain", lambda transfer, _: transfer)
        with (
            merged,
            self.assertRaisesRegex(RuntimeError, "have all-gather 5 times, but has .*: 1}"),
        ):
            start_sharded(gather, arguments, problem.mesh, 5, "all-gather")

    def test_calls_with_others_in_turn(self):
        """All are in the program, though nobody reads the results of the first."""
        product = lambda x, y: jnp.dot(x, y)
        compute = lambda arguments: in_turn(product, arguments[0], [(y,) for y in arguments[1]])
        matrices = [jnp.full((96, 96), value, jnp.float32) for value in (1.0, 2.0, 3.0)]
        started = start_jax(compute, [(jnp.eye(96), matrices)], repeats=3)
        np.testing.assert_array_equal(started.call(started.arguments[0]), matrices[-1])
        text = started.call.as_text()
        self.assertEqual(text.count(" dot("), 3)
        with self.assertRaisesRegex(RuntimeError, "should have matmul 3 times, but has"):
            start_jax(compute, started.arguments, repeats=3, evidence="matmul")

    def test_as_many_calls_as_asked_for(self):
        calls = []

        def transfer(x):
            jax.debug.callback(lambda: calls.append(1))
            return jax.lax.all_gather(x, "expert", tiled=True)

        for chained in (1, 2, 20):
            calls.clear()
            problem = transfer_problem_of()
            arguments = [(operands.x,) for operands in problem.sets]
            started = start_sharded(transfer, arguments, problem.mesh, chained, "all-gather")
            result = started.call(arguments[1])
            jax.effects_barrier()
            self.assertLen(calls, 4 * chained)
            expected = np.tile(np.asarray(arguments[1][0]), (4, 1))
            testing.assert_bitwise(result, expected)

    def test_instructions_are_counted(self):
        """In all computations; asynchronous ones once, and nothing that is only named like them."""
        text = """HloModule m, is_scheduled=true

%wrapped (p: f32[4]) -> f32[8] {
  %p = f32[4] parameter(0)
  ROOT %g = f32[8] all-gather(%p), dimensions={0}
}

%wrapped.1 (p: f32[4]) -> f32[4] {
  ROOT %c.1 = f32[4] custom-call(%p), custom_call_target="jax_ep.combine.v1"
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %all-gather.1 = (f32[4], f32[8]) all-gather-start(%p), metadata={op_name="all-gather"}
  %all-gather.2 = f32[8] all-gather-done(%all-gather.1)
  %async = ((f32[4]), f32[8], u32[]) async-start(%all-gather.2), calls=%wrapped
  %async.1 = f32[8] async-done(%async)
  %s = ((f32[8]), f32[4], u32[]) custom-call-start(%async.1), custom_call_target="jax_ep.combine.v1"
  %d = f32[4] custom-call-done(%s), custom_call_target="jax_ep.combine.v1"
  %f = f32[4] fusion(%d), calls=%wrapped.1
  %r = (f32[4], s32[1]) custom-call(%f), custom_call_target="jax_ep.dispatch.v1"
  ROOT %x = f32[4] ragged-all-to-all(%r), channel_id=1
}
"""
        self.assertEqual(programs.collectives(text), {"all-gather": 2, "ragged-all-to-all": 1})
        calls = {"jax_ep.combine.v1": 2, "jax_ep.dispatch.v1": 1}
        self.assertEqual(programs.custom_calls(text), calls)


if __name__ == "__main__":
    absltest.main()
