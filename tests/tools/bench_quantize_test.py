"""`python -m jax_ep.bench quantize`: its bytes and a smoke run; and transfers of quantized rows."""

from __future__ import annotations

import dataclasses
import unittest.mock

import testing  # isort: skip

import jax
import numpy as np
from absl.testing import absltest, parameterized
from bench_command import SHAPE, smoke, transfer_problem_of
from programs import lower_for_cuda

from jax_ep.bench.common.benchmark import Case
from jax_ep.bench.common.programs import kernels, sharded
from jax_ep.bench.common.report import OURS
from jax_ep.bench.matmul.fp8 import BFLOAT16
from jax_ep.bench.quantize import benchmark as quantize
from jax_ep.bench.quantize.benchmark import Shape
from jax_ep.bench.transfer import fp8 as transfer_fp8
from jax_ep.bench.transfer.benchmark import BENCHMARK


class QuantizeTest(parameterized.TestCase):
    @parameterized.parameters(
        ("quantize_block128", 1, 384 * 56),
        ("quantize_row", 1, 384),
        ("quantize_weights", 2, 2 * 3 * 56),
        ("quantize_updated_weights", 2, 2 * 3 * 56, 4),
    )
    def test_bytes_of_a_pass(self, operation, written, num_scales, read=2):
        case = Case(operation, Shape(384, 7168), "normal")
        expected = (read + written) * 384 * 7168 + 4 * num_scales
        self.assertEqual(quantize.pass_bytes(case, quantize.computation(operation)), expected)

    def test_kernels_of_a_program(self):
        text = """HloModule jit_f
%fused (a: f32[2]) -> f32[2] {
  ROOT %c = f32[2]{0} convert(%a)
}

ENTRY %main (x: bf16[2]) -> f32[2] {
  %x = bf16[2]{0} parameter(0)
  %f = f32[2]{0} fusion(%x), kind=kLoop, calls=%fused
  %b = s32[2]{0} bitcast(%f)
  ROOT %c = f32[2]{0} custom-call(%b), custom_call_target="jax_ep.x.v1"
}
"""
        self.assertEqual(kernels(text), 2)

    def test_smoke(self):
        status, output, results = smoke("quantize")
        self.assertEqual(status, 0, output)
        self.assertEqual([c["operation"] for c in results["cases"]], list(quantize.OPERATIONS))
        for record in results["cases"]:
            updated = record["operation"] == quantize.UPDATED_WEIGHTS
            cast = [quantize.CAST] if updated else []
            self.assertEqual(list(record["measurements"]), [OURS, quantize.PURE_JAX, *cast])
            for measurement in record["measurements"].values():
                rate = measurement["facts"]["bytes"] / measurement["seconds"]
                self.assertAlmostEqual(measurement["gigabytes_per_second"], rate / 1e9)
                of_copy = rate / results["copy_bytes_per_second"]
                self.assertAlmostEqual(measurement["of_copy"], of_copy)


LONGER_ROWS = dataclasses.replace(SHAPE, hidden=32)  # has whole vectors in four bits, too


class TransferTest(parameterized.TestCase):
    @parameterized.parameters(*transfer_fp8.OPERATIONS)
    def test_providers_send_the_same_rows(self, operation):
        """Each has the bits of pure JAX; rows quantized before and in the call are the same."""
        problem = transfer_problem_of(shape=LONGER_ROWS)
        case = Case(operation, LONGER_ROWS, "zipf")
        results = {}
        for provider in transfer_fp8.PROVIDERS:
            started = provider.start(case, problem)
            self.assertTrue(started.facts["checked"])
            results[provider.name] = started.call(started.arguments[0]).rows
        self.assertEqual(set(results), {name for (name,) in BENCHMARK.required(case.record())})
        before, in_call = results[OURS], results[transfer_fp8.IN_CALL]
        self.assertEqual(before.format, transfer_fp8.format_of(operation))
        jax.tree.map(testing.assert_bitwise, before, in_call)
        self.assertEqual(results[BFLOAT16].dtype, jax.numpy.bfloat16)

    @parameterized.parameters(*transfer_fp8.OPERATIONS)
    def test_one_custom_call_on_cuda(self, operation):
        problem = transfer_problem_of(shape=LONGER_ROWS)
        for provider in transfer_fp8.PROVIDERS:
            arguments = provider.arguments(operation, problem)[0]
            transfer = provider.transfers(problem, "cuda")[operation]
            with unittest.mock.patch.object(jax, "default_backend", lambda: "gpu"):
                program = lower_for_cuda(sharded(transfer, problem.mesh), *arguments)
            expected = {transfer_fp8.transfer_of(operation): 1}
            if provider.name == transfer_fp8.IN_CALL and operation.endswith(("block128", "row")):
                expected["quantize"] = 1  # there are no kernels for other formats
            self.assertEqual(program.targets, expected)

    @parameterized.parameters("values", "scales")
    def test_a_wrong_row_is_no_result(self, name):
        class Wrong(transfer_fp8.Quantized):
            def transfers(self, problem, implementation):
                right = super().transfers(problem, implementation)
                if implementation == "xla":
                    return right

                def changed(*arguments):
                    sent = right["dispatch_row"](*arguments)
                    array = getattr(sent.rows, name)
                    array = array.at[0, 0].set(np.array(3, array.dtype))
                    rows = dataclasses.replace(sent.rows, **{name: array})
                    return dataclasses.replace(sent, rows=rows)

                return right | {"dispatch_row": changed}

        case = Case("dispatch_row", LONGER_ROWS, "zipf")
        with self.assertRaisesRegex(ArithmeticError, "dispatch_row is wrong: "):
            Wrong(OURS, "before").start(case, transfer_problem_of(shape=LONGER_ROWS))


if __name__ == "__main__":
    absltest.main()
