"""`python -m jax_ep.bench matmul`: its operands, providers and figures, and a smoke run."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import types
import unittest.mock
import weakref

import testing  # isort: skip  # noqa: F401  sets the devices

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from bench_command import QUICK, smoke
from programs import lower_for_cuda

from jax_ep.bench.common import harness, timing
from jax_ep.bench.common.benchmark import Case
from jax_ep.bench.matmul import benchmark as matmul
from jax_ep.bench.matmul import fp8 as matmul_fp8
from jax_ep.bench.matmul import mxfp4 as matmul_mxfp4
from jax_ep.bench.matmul import providers
from jax_ep.bench.matmul.benchmark import BENCHMARK, Shape, group_sizes, make_operands

SHAPE = Shape(rows=24, k=16, n=8, groups=3)
CASE = Case("forward", SHAPE, "balanced")
ON_CPU = {p.name: p for p in providers.PROVIDERS if p.name in ("dense", "jax_ep", "lax.ragged_dot")}


def problem_of(shape=SHAPE, distribution="balanced"):
    return make_operands(shape, group_sizes(shape, distribution), 0)


class OperandsTest(parameterized.TestCase):
    @parameterized.product(shape=(*matmul.SHAPES, SHAPE), distribution=matmul.DISTRIBUTIONS)
    def test_groups_sum_to_rows(self, shape, distribution):
        sizes = group_sizes(shape, distribution)
        self.assertEqual((sizes.dtype, sizes.shape), (np.int32, (shape.groups,)))
        self.assertEqual(sizes.sum(), shape.rows)
        self.assertGreaterEqual(sizes.min(), 0)
        np.testing.assert_array_equal(sizes, group_sizes(shape, distribution))

    def test_distributions(self):
        shape = matmul.SHAPES[0]
        balanced, multinomial, zipf = (group_sizes(shape, d) for d in matmul.DISTRIBUTIONS)
        self.assertEqual(set(balanced), {512})
        self.assertEqual(sorted(group_sizes(Shape(8, 1, 1, 3), "balanced")), [2, 3, 3])
        # 512 rows per group with a standard deviation of 22.4
        self.assertBetween(multinomial.std(), 15, 30)
        ranks = np.arange(1, 65) ** -1.2
        expected = shape.rows * ranks / ranks.sum()
        np.testing.assert_allclose(np.sort(zipf)[::-1], expected, atol=5 * expected[0] ** 0.5)
        self.assertGreater(np.argmax(zipf), 0)  # ranks are permuted

    def test_operands_rotate_past_the_cache(self):
        problem = make_operands(SHAPE, group_sizes(SHAPE, "zipf"), 3000)
        self.assertLen(problem, 5)  # dense reads out_gradient and a matrix: 640 bytes
        forward = make_operands(SHAPE, group_sizes(SHAPE, "zipf"), 3000, {"forward"})
        self.assertLen(forward, 3)  # it reads lhs and a matrix: 1024 bytes
        self.assertEqual([x.shape for x in problem[0]], [(24, 16), (3, 16, 8), (24, 8), (3,)])
        self.assertFalse(np.array_equal(problem[0].rhs, problem[1].rhs))
        self.assertEqual(problem.facts["group_sizes"], group_sizes(SHAPE, "zipf").tolist())


class ProvidersTest(parameterized.TestCase):
    @parameterized.product(operation=providers.OPERATIONS, name=list(ON_CPU))
    def test_same_numbers(self, operation, name):
        """One group, so that dense computes the same; the others in several as well."""
        for groups in (1,) if name == "dense" else (1, 3):
            shape = Shape(SHAPE.rows, SHAPE.k, SHAPE.n, groups)
            operands = problem_of(shape)
            started = ON_CPU[name].start(Case(operation, shape, "balanced"), operands)
            result = np.asarray(started.to_jax(started.call(started.arguments[0])), np.float64)
            x = [np.asarray(a, np.float64) for a in operands[0]]
            rows = np.split(np.arange(shape.rows), groups)
            expected = {
                "forward": lambda lhs, rhs, out, g: lhs @ rhs[g],
                "input_gradient": lambda lhs, rhs, out, g: out @ rhs[g].T,
                "weight_gradient": lambda lhs, rhs, out, g: lhs.T @ out,
            }[operation]
            parts = [expected(x[0][r], x[1], x[2][r], g) for g, r in enumerate(rows)]
            np.testing.assert_allclose(
                result.reshape(-1), np.concatenate(parts).reshape(-1), atol=0.1, rtol=0.01
            )

    @parameterized.parameters(*providers.OPERATIONS)
    def test_ours_is_one_custom_call_on_cuda(self, operation):
        """Nothing of the other gradient is in the program."""
        with unittest.mock.patch.object(jax, "default_backend", lambda: "gpu"):
            program = lower_for_cuda(providers.ours(operation), problem_of()[0])
        self.assertEqual(program.text.count("stablehlo.custom_call @jax_ep"), 1)

    @parameterized.parameters(*matmul_fp8.OPERATIONS)
    def test_fp8(self, operation):
        """jax_ep's own providers agree; torch's say why they do not run."""
        case = Case(operation, Shape(rows=64, k=256, n=144, groups=2), "multinomial")
        with (
            unittest.mock.patch.multiple(timing, **QUICK),
            unittest.mock.patch.dict(sys.modules, {"torch": None}),
        ):
            comparison = harness.Comparison(
                BENCHMARK, case, problem_of(case.shape, "multinomial"), 1, {}
            )
            for provider in (p for p in BENCHMARK.providers if operation in p.operations):
                comparison.measure(provider)
        measurements = comparison.measurements
        names = {name for (name,) in matmul_fp8.REQUIRED}
        self.assertEqual(set(measurements), names)
        facts = measurements[matmul_fp8.BFLOAT16]["facts"]
        self.assertBetween(facts["relative_difference"], 0.02, matmul.MAX_FP8_DIFFERENCE)
        for name in names - {"jax_ep", matmul_fp8.BFLOAT16}:
            self.assertIn("ModuleNotFoundError", measurements[name]["error"])

    @parameterized.parameters(*matmul_fp8.OPERATIONS)
    def test_fp8_is_one_custom_call_on_cuda(self, operation):
        shape = Shape(rows=64, k=256, n=144, groups=2)
        case = Case(operation, shape, "balanced")
        operands = matmul_fp8.quantized(case, problem_of(shape)[0])
        program = lower_for_cuda(matmul_fp8.multiply("cuda"), operands)
        self.assertEqual(program.targets, {"grouped_matmul_quantized": 1})
        self.assertNotIn("stablehlo.transpose", program.text)

    def test_mxfp4(self):
        """The same products in bfloat16, others in FP8; torch says why it does not run."""
        case = Case("forward_mxfp4", Shape(rows=64, k=256, n=144, groups=3), "multinomial")
        problem = problem_of(case.shape, "multinomial")
        comparison = harness.Comparison(BENCHMARK, case, problem, 1, {})
        with (
            unittest.mock.patch.multiple(timing, **QUICK),
            unittest.mock.patch.dict(sys.modules, {"torch": None}),
        ):
            for provider in matmul_mxfp4.PROVIDERS:
                comparison.measure(provider)
        measurements = comparison.measurements
        self.assertEqual(set(measurements), {name for (name,) in matmul_mxfp4.REQUIRED})
        difference = lambda name: measurements[name]["facts"]["relative_difference"]
        self.assertLess(difference(matmul_mxfp4.DEQUANTIZED), 1e-3)
        self.assertBetween(difference(matmul_mxfp4.FP8), 0.02, matmul.MAX_FP8_DIFFERENCE)
        self.assertIn("ModuleNotFoundError", measurements[matmul_mxfp4.PER_ROW]["error"])
        # The last call has the first sizes, two steps of five groups further.
        started = comparison.started["jax_ep"]
        result = np.asarray(started.call(started.arguments[0]), np.float64)
        rows, weights = matmul_mxfp4.dequantized(problem[0].lhs, problem[0].rhs)
        x, w = (np.asarray(a, np.float64) for a in (rows, weights))
        sizes = np.roll(problem[0].sizes, 2 * 5)
        parts = np.split(x, np.cumsum(sizes)[:-1])
        expected = np.concatenate([part @ w[group] for group, part in enumerate(parts)])
        np.testing.assert_allclose(result, expected, rtol=0.01, atol=0.01 * np.abs(expected).max())

    def test_a_captured_graph_keeps_what_it_reads(self):
        """Freed operands would be overwritten: once torch found such ends of groups."""
        torch = unittest.mock.MagicMock()
        operand, end = np.zeros(1), np.ones(1)
        read = [weakref.ref(operand), weakref.ref(end)]
        launch = matmul_mxfp4.captured(torch, lambda x, held=operand: held + x, [end])
        del operand, end
        gc.collect()
        self.assertNotIn(None, [reference() for reference in read])
        self.assertEqual(launch(), 1)
        torch.cuda.CUDAGraph().replay.assert_called_once_with()

    @parameterized.parameters(1, 4, 16)
    def test_groups_with_rows_are_others_in_turn(self, rows):
        shape = Shape(rows, 32, 8, 32)
        in_turn = matmul_mxfp4.sizes_in_turn(jnp.asarray(group_sizes(shape, "multinomial")))
        self.assertLen(in_turn, 32)
        self.assertEqual({int(sizes.sum()) for sizes in in_turn}, {rows})
        np.testing.assert_array_equal(np.ptp(sum(sizes for sizes in in_turn)), 0)

    @parameterized.parameters(*(p for p in matmul_mxfp4.PROVIDERS if hasattr(p, "target")))
    def test_mxfp4_is_one_custom_call_per_group_on_cuda(self, provider):
        shape = Shape(rows=64, k=256, n=144, groups=3)
        operands = provider.arguments(problem_of(shape))
        with unittest.mock.patch.object(jax, "default_backend", lambda: "gpu"):
            program = lower_for_cuda(provider.calls, operands)
        self.assertEqual(program.targets, {provider.target: 3})
        self.assertNotIn("stablehlo.transpose", program.text)

    def test_calls_of_torch_are_captured(self):
        """A stand-in shows that a call comes before, and that results are those of the last."""
        launched = []
        capturing = contextlib.ExitStack()
        capturing.callback(launched.append, "end")
        graph = types.SimpleNamespace(replay=lambda: launched.append("replay"))
        cuda = types.SimpleNamespace(
            synchronize=lambda: launched.append("begin"),
            CUDAGraph=lambda: graph,
            graph=lambda graph, capture_error_mode: capturing,
        )

        def matmul(x):
            launched.append(x)
            return -x

        replay = matmul_mxfp4.captured(types.SimpleNamespace(cuda=cuda), matmul, [1, 2, 3])
        self.assertEqual(launched, [1, "begin", 1, 2, 3, "end"])
        self.assertEqual(replay(), -3)
        self.assertEqual(launched[6:], ["replay"])

    @parameterized.parameters((1.1, "0.1"), (np.nan, "nan"))
    def test_a_wrong_result_is_no_result(self, factor, difference):
        def wrong(operation):
            right = providers.ragged_dot(operation)
            return lambda x: right(x).at[-1].multiply(jnp.bfloat16(factor)) * jnp.bfloat16(factor)

        comparison = harness.Comparison(BENCHMARK, CASE, problem_of(), 1, {})
        with unittest.mock.patch.multiple(timing, **QUICK):
            comparison.measure(ON_CPU["jax_ep"])
            comparison.measure(ON_CPU["lax.ragged_dot"])
            comparison.measure(providers.Computed("wrong", wrong))
        self.assertIn("rounds", comparison.measurements["jax_ep"])
        facts = comparison.measurements["lax.ragged_dot"]["facts"]
        self.assertLess(facts["relative_difference"], matmul.MAX_DIFFERENCE)
        self.assertRegex(
            comparison.measurements["wrong"]["error"],
            f"differs from that of jax_ep by {difference}",
        )

    @parameterized.product(
        shape=((1,), (7, 5), (1, 3), (3, 5, 7), (1, 2, 3)), dtype=(jnp.bfloat16, jnp.float32)
    )
    def test_relative_difference(self, shape, dtype):
        random = np.random.default_rng(0)
        a, b = (jnp.asarray(random.normal(size=shape), dtype) for _ in range(2))
        x, y = (np.asarray(array, np.float64) for array in (a, b))
        expected = np.linalg.norm(x - y) / np.linalg.norm(y)
        self.assertAlmostEqual(float(matmul.relative_difference(a, b)), expected, places=5)
        self.assertEqual(float(matmul.relative_difference(b, b)), 0)

    def test_tokamax_configurations_are_tried_once_for_a_shape(self):
        tried = []

        def start(self, operation, operands, config):
            tried.append(config)
            if config == self.configs[-1]:
                raise ValueError("does not fit")
            started = providers.start_jax(lambda x: x.lhs, operands)
            started.facts["config"] = config
            return started

        tokamax = providers.Tokamax("mosaic", "mosaic_gpu", ({"a": 1}, {"a": 2}))
        with (
            unittest.mock.patch.object(providers.Tokamax, "_start", start),
            unittest.mock.patch.multiple(timing, **QUICK),
        ):
            fastest = tokamax.start(CASE, problem_of()).facts["config"]
            self.assertEqual(tried, [None, {"a": 1}, {"a": 2}, fastest])
            tokamax.start(CASE, problem_of())
            self.assertEqual(tried[4:], [fastest])


class FiguresTest(absltest.TestCase):
    def test_figures(self):
        shape = Shape(100, 1000, 1000, 2)
        records = []
        for distribution, sizes in (("balanced", [50, 50]), ("zipf", [65, 35])):
            record = Case("forward", shape, distribution).record()
            measurements = {"dense": {"seconds": 1e-6}, "jax_ep": {"seconds": 2e-6}, "torch": {}}
            records.append(record | {"group_sizes": sizes, "measurements": measurements})
        BENCHMARK.add_figures({"cases": records, "copy_bytes_per_second": 4e12})
        balanced, uneven = (record["measurements"] for record in records)
        self.assertAlmostEqual(balanced["dense"]["tflops"], 200)
        self.assertAlmostEqual(balanced["jax_ep"]["tflops"], 100)
        # 4 MB of weights in 2 us, beside 4 TB/s
        self.assertAlmostEqual(balanced["jax_ep"]["of_copy"], 0.5)
        self.assertNotIn("rounded_up_tflops", balanced["jax_ep"])
        # 65 and 35 rows fill 3 tiles of 64
        self.assertAlmostEqual(uneven["jax_ep"]["rounded_up_tflops"], 100 * 100 / 192)
        self.assertNotIn("rounded_up_tflops", uneven["dense"])
        self.assertEqual(balanced["torch"], {})

    def test_eight_bit_weights(self):
        shape = Shape(100, 1000, 1000, 2)
        record = Case("forward_block128", shape, "balanced").record()
        names = ("jax_ep", matmul_fp8.BFLOAT16, "dense")
        measured = {name: {"seconds": 2e-6} for name in names}
        record |= {"group_sizes": [50, 50], "measurements": measured}
        BENCHMARK.add_figures({"cases": [record], "copy_bytes_per_second": 4e12})
        self.assertAlmostEqual(measured["jax_ep"]["of_copy"], 0.25)
        self.assertAlmostEqual(measured[matmul_fp8.BFLOAT16]["of_copy"], 0.5)
        self.assertNotIn("of_copy", measured["dense"])

    def test_four_bit_weights(self):
        """Counts groups with rows alone, and scales, too."""
        shape = Shape(100, 1024, 1000, 4)
        record = Case("forward_mxfp4", shape, "balanced").record()
        names = [name for (name,) in matmul_mxfp4.REQUIRED]
        measured = {name: {"seconds": 1e-6} for name in names}
        record |= {"group_sizes": [50, 0, 50, 0], "measurements": measured}
        BENCHMARK.add_figures({"cases": [record], "copy_bytes_per_second": 4e12})
        for name, megabytes in zip(names, (1.088, 4.096, 2.048, 2.048), strict=True):
            self.assertAlmostEqual(measured[name]["weights_tbps"], megabytes)
            self.assertAlmostEqual(measured[name]["of_copy"], megabytes / 4)

    def test_default_shapes(self):
        shapes = {
            operations: BENCHMARK.default_shapes(
                types.SimpleNamespace(operation=list(operations), smoke=False)
            )
            for operations in ((), ("forward_mxfp4",), ("forward", "forward_mxfp4"))
        }
        gpt_oss = [shapes[("forward_mxfp4",)][i] for i in (0, 1, -1)]
        self.assertEqual([s.rows for s in gpt_oss], [1, 1, 16384])
        self.assertEqual([s.n for s in gpt_oss], [5760, 2880, 2880])
        self.assertEqual({(s.k, s.groups) for s in gpt_oss}, {(2880, 32)})
        self.assertEqual(shapes[()], matmul.SHAPES)
        self.assertEqual(shapes["forward", "forward_mxfp4"], matmul.SHAPES)


class CommandTest(parameterized.TestCase):
    def test_smoke(self):
        arguments = ("--shape", "24,16,8,3", "--operation", "forward")
        status, output, results = smoke("matmul", *arguments)
        self.assertEqual(status, 0, output)
        self.assertLessEqual({"jax", "jax_ep", "tokamax", "torch"}, results["versions"].keys())
        self.assertEqual([c["variant"] for c in results["cases"]], list(matmul.DISTRIBUTIONS))
        self.assertFalse(results["counts"])
        for record in results["cases"]:
            measurements = record["measurements"]
            self.assertEqual(list(measurements), [p.name for p in providers.PROVIDERS])
            for name in ON_CPU:
                self.assertGreater(measurements[name]["seconds"], 0)
                self.assertGreater(measurements[name]["jax_ep_speedup"], 0)
                times = measurements[name]["rounds"][0]
                for average in ("mean", "median"):
                    self.assertBetween(times[average], times["minimum"], times["maximum"])
                self.assertEqual(times["iterations"], 2)
            rounds = {name: len(measurements[name]["rounds"]) for name in ON_CPU}
            self.assertEqual(rounds, {"dense": 3, "jax_ep": 2, "lax.ragged_dot": 1})
        self.assertIn("forward on 8 x cpu", output)
        self.assertIn("smoke test", output)

    def test_missing_providers_are_reported(self):
        arguments = ("--shape", "8,8,8,2", "--operation", "forward", "--groups", "zipf")
        arguments += ("--provider", "jax_ep", "--provider", "torch", "--require-all")
        with unittest.mock.patch.dict(sys.modules, {"torch": None}):  # not even if it is installed
            status, output, results = smoke("matmul", *arguments)
        self.assertEqual(status, 1)
        reasons = {gap["provider"]: gap["reason"] for gap in results["missing"]}
        self.assertIn("ModuleNotFoundError", reasons["torch"])
        self.assertEqual(reasons["dense"], "it was not run")
        self.assertNotIn("jax_ep", reasons)
        self.assertRegex(output, "missing in 1 of 1 cases: torch: ModuleNotFoundError")

    def test_smoke_of_four_bits(self):
        arguments = ("--shape", "24,64,8,3", "--operation", "forward_mxfp4", "--groups", "balanced")
        with unittest.mock.patch.dict(sys.modules, {"torch": None}):
            status, output, results = smoke("matmul", *arguments)
        self.assertEqual(status, 0, output)
        (record,) = results["cases"]
        measured = record["measurements"]
        self.assertEqual(list(measured), [p.name for p in matmul_mxfp4.PROVIDERS])
        rounds = {name: len(measured[name].get("rounds", ())) for name in measured}
        expected = {"jax_ep": 2, matmul_mxfp4.DEQUANTIZED: 3, matmul_mxfp4.FP8: 1}
        self.assertEqual(rounds, expected | {matmul_mxfp4.PER_ROW: 0})
        (gap,) = results["missing"]
        self.assertIn("ModuleNotFoundError", gap["reason"])

    def test_a_second_without_warming_up(self):
        self.assertEqual(BENCHMARK.iterations * timing.BURST_SECONDS, 1)
        comparison = harness.Comparison(BENCHMARK, CASE, problem_of(), 7, {})
        with unittest.mock.patch.object(timing, "device_times", return_value=[1.0]) as timed:
            comparison.measure(ON_CPU["dense"])
        _, _, iterations, _, warm_up_seconds = timed.call_args.args
        self.assertEqual((iterations, warm_up_seconds), (7, 0))

    def test_without_a_gpu(self):
        result = subprocess.run(
            [sys.executable, "-P", "-m", "jax_ep.bench", "matmul"],  # not the checkout
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertIn("There is no GPU", result.stdout)


if __name__ == "__main__":
    absltest.main()
