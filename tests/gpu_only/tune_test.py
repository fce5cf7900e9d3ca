"""tune on this tier's GPUs: what it writes is used, and changes no bit."""

from __future__ import annotations

import pathlib
import tempfile

import testing  # isort: skip

import cuda_programs
import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized

import jax_ep
from jax_ep import quant
from jax_ep._src.core import runtime
from jax_ep._src.transfer import tune, tuning

SIZES = tune.Sizes(512, 1024, 16, 4)


class TuneTest(parameterized.TestCase):
    @parameterized.parameters(None, quant.Fp8Block128())
    def test_bits_and_times(self, quantization):
        self.addCleanup(jax_ep.use_tuning, None)
        file = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()), "tuning.json")
        times = jax_ep.tune(file, *SIZES, quantization=quantization)
        numbers = set(tune.candidates(runtime.num_sms()))
        self.assertEqual(set(times), set(tune.OPERATIONS))
        for of_operation in times.values():
            self.assertEqual(set(of_operation), numbers)
            self.assertLess(max(of_operation.values()), 1e5)  # µs
        (calls,) = tuning.read(file).values()
        problem = tune.Problem(
            testing.expert_mesh(), SIZES, jnp.dtype("bfloat16"), quantization, None
        )
        results = {}
        for operation in tune.OPERATIONS:
            calls_of_five = problem.program(operation, 0, 5).lower(*problem.arguments[operation])
            found = cuda_programs.targets(calls_of_five.compile())
            self.assertEqual(found, {operation: 5})  # XLA merges and removes none
        for operation in tune.OPERATIONS:
            call = problem.call(operation)
            # The number that is used may be 0: another, so that the look-up shows.
            tuning.write(file, runtime.gpu_kind(), {call: (calls[call] or 20, {})})
            for used in None, file:
                jax_ep.use_tuning(used)
                program = problem.program(operation, 0)
                results[used] = jax.tree.leaves(program(*problem.arguments[operation]))
            for found, expected in zip(results[file], results[None], strict=True):
                testing.assert_bitwise(found, expected)


if __name__ == "__main__":
    absltest.main()
