"""`python -m jax_ep.bench matmul`: what it computes, what it makes of times, and what it writes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import unittest.mock

import testing  # isort: skip  # noqa: F401  sets the devices

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from bench_command import QUICK, smoke
from programs import lower_for_cuda

from jax_ep.bench import cases, contenders, matmul, matmul_report, measure, peers, timing

SHAPE = cases.Shape(rows=24, k=16, n=8, groups=3)
ON_CPU = (contenders.Dense, contenders.Ours, contenders.RaggedDot)


class CasesTest(parameterized.TestCase):
    @parameterized.product(shape=(*cases.SHAPES, SHAPE), distribution=cases.DISTRIBUTIONS)
    def test_groups_sum_to_rows(self, shape, distribution):
        sizes = cases.group_sizes(shape, distribution)
        self.assertEqual((sizes.dtype, sizes.shape), (np.int32, (shape.groups,)))
        self.assertEqual(sizes.sum(), shape.rows)
        self.assertGreaterEqual(sizes.min(), 0)
        np.testing.assert_array_equal(sizes, cases.group_sizes(shape, distribution))

    def test_distributions(self):
        shape = cases.SHAPES[0]
        balanced, multinomial, zipf = (cases.group_sizes(shape, d) for d in cases.DISTRIBUTIONS)
        self.assertEqual(set(balanced), {512})
        self.assertEqual(sorted(cases.group_sizes(cases.Shape(8, 1, 1, 3), "balanced")), [2, 3, 3])
        # 512 rows a group with a standard deviation of 22.4
        self.assertBetween(multinomial.std(), 15, 30)
        ranks = np.arange(1, 65) ** -1.2
        expected = shape.rows * ranks / ranks.sum()
        np.testing.assert_allclose(np.sort(zipf)[::-1], expected, atol=5 * expected[0] ** 0.5)
        self.assertGreater(np.argmax(zipf), 0)  # ranks are permuted

    def test_chosen(self):
        self.assertLen(cases.choose_cases(cases.SHAPES, None, None), (6 + 2) * 3)
        chosen = cases.choose_cases(cases.SHAPES, ["zipf"], ["forward"])
        self.assertEqual(chosen, [cases.Case(s, "zipf", "forward") for s in cases.SHAPES])

    def test_parsed(self):
        self.assertEqual(cases.parse_shape("1,2,3,4"), cases.Shape(1, 2, 3, 4))
        for text in ("1,2,3", "a,b,c,d", "1,2,3,0", ""):
            with self.assertRaisesRegex(argparse.ArgumentTypeError, "ROWS,K,N,GROUPS"):
                cases.parse_shape(text)

    def test_operands_rotate_past_the_cache(self):
        first, *others = cases.make_operands(SHAPE, cases.group_sizes(SHAPE, "zipf"), 3000)
        self.assertLen(others, 4)  # dense reads out_gradient and a matrix: 640 bytes
        self.assertEqual([x.shape for x in first], [(24, 16), (3, 16, 8), (24, 8), (3,)])
        self.assertFalse(np.array_equal(first.rhs, others[0].rhs))


class ContendersTest(parameterized.TestCase):
    @parameterized.product(operation=cases.OPERATIONS, contender=ON_CPU)
    def test_same_numbers(self, operation, contender):
        """One group, so that dense computes the same; the others in several as well."""
        for groups in (1,) if contender is contenders.Dense else (1, 3):
            shape = cases.Shape(SHAPE.rows, SHAPE.k, SHAPE.n, groups)
            operands = cases.make_operands(shape, cases.group_sizes(shape, "balanced"), 0)
            started = contender().start(operation, operands)
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

    @parameterized.parameters(*cases.OPERATIONS)
    def test_ours_is_one_custom_call_on_cuda(self, operation):
        """Nothing of the other gradient is in the program."""
        operands = cases.make_operands(SHAPE, cases.group_sizes(SHAPE, "balanced"), 0)
        with unittest.mock.patch.object(jax, "default_backend", lambda: "gpu"):
            program = lower_for_cuda(contenders.Ours().computation(operation), operands[0])
        self.assertEqual(program.text.count("stablehlo.custom_call @jax_ep"), 1)

    def test_dense_is_measured_before_and_after(self):
        names = [contender.name for contender in matmul.in_turn([make() for make in ON_CPU])]
        again = ["jax_ep", "dense"] * matmul.ROUNDS
        self.assertEqual(names, ["dense", *again, "lax.ragged_dot"])


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
        """By a clock that calls move: by 50 ms until a second has passed, by 25 ms then."""
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


class FiguresTest(absltest.TestCase):
    def results(self, **means):
        """Results of one balanced and one uneven case, with these means in seconds."""
        shape = cases.Shape(100, 1000, 1000, 2)
        records = []
        for distribution, sizes in (("balanced", [50, 50]), ("zipf", [65, 35])):
            record = matmul_report.new_record(
                cases.Case(shape, distribution, "forward"), np.array(sizes)
            )
            for name, rounds in means.items():
                record["measurements"][name] = {"rounds": [{"mean": s} for s in rounds]}
            records.append(record)
        return {"cases": records, "copy_bytes_per_second": 4e12, "smoke": False}

    def test_ratios(self):
        # The first of several rounds does not count.
        results = self.results(dense=[9e-6, 0.8e-6, 1.2e-6], jax_ep=[9e-6, 2e-6], torch=[3e-6])
        matmul_report.add_figures(results)
        matmul_report.add_figures(results)  # as after every measurement
        balanced, uneven = (record["measurements"] for record in results["cases"])
        self.assertAlmostEqual(balanced["dense"]["seconds"], 1e-6)
        self.assertAlmostEqual(balanced["dense"]["tflops"], 200)
        self.assertAlmostEqual(balanced["jax_ep"]["tflops"], 100)
        self.assertAlmostEqual(balanced["dense"]["jax_ep_speedup"], 0.5)
        self.assertAlmostEqual(balanced["torch"]["jax_ep_speedup"], 1.5)
        # 4 MB of weights in 2 us, beside 4 TB/s
        self.assertAlmostEqual(balanced["jax_ep"]["of_copy"], 0.5)
        self.assertNotIn("rounded_up_tflops", balanced["jax_ep"])
        # 65 and 35 rows fill 3 tiles of 64
        self.assertAlmostEqual(uneven["jax_ep"]["rounded_up_tflops"], 100 * 100 / 192)

    def test_missing(self):
        results = self.results(**{"dense": [1], "jax_ep": [1], "lax.ragged_dot": [1]})
        results["cases"][0]["measurements"]["torch"] = {"error": "ModuleNotFoundError: no torch"}
        for record in results["cases"]:
            record["measurements"]["tokamax triton"] = {"rounds": [{"mean": 1}]}
        matmul_report.add_figures(results)
        self.assertEqual(
            results["missing"],
            [
                {"contender": "torch", "reason": "ModuleNotFoundError: no torch", "cases": 1},
                {"contender": "torch", "reason": "it was not run", "cases": 1},
            ],
        )
        self.assertFalse(results["counts"])
        for record in results["cases"]:
            record["measurements"]["torch"] = {"rounds": [{"mean": 1}]}
        matmul_report.add_figures(results)
        self.assertEqual((results["missing"], results["counts"]), ([], True))


class CommandTest(parameterized.TestCase):
    def test_smoke(self):
        arguments = ("--shape", "24,16,8,3", "--operation", "forward")
        status, output, results = smoke("matmul", *arguments)
        self.assertEqual(status, 0, output)
        self.assertLessEqual({"jax", "jax_ep", "tokamax", "torch"}, results["versions"].keys())
        self.assertEqual([c["distribution"] for c in results["cases"]], list(cases.DISTRIBUTIONS))
        self.assertFalse(results["counts"])
        for record in results["cases"]:
            self.assertEqual(list(record["measurements"]), list(matmul.NAMES))
            for contender in ON_CPU:
                measurement = record["measurements"][contender.name]
                self.assertGreater(measurement["seconds"], 0)
                self.assertGreater(measurement["jax_ep_speedup"], 0)
                times = measurement["rounds"][0]
                for summary in ("mean", "median"):
                    self.assertBetween(times[summary], times["minimum"], times["maximum"])
                self.assertEqual(times["iterations"], 2)
            rounds = {name: len(m.get("rounds", [])) for name, m in record["measurements"].items()}
            self.assertEqual(
                (rounds["jax_ep"], rounds["dense"]), (matmul.ROUNDS, matmul.ROUNDS + 1)
            )
            self.assertEqual(rounds["lax.ragged_dot"], 1)
        self.assertIn("forward on cpu", output)
        self.assertIn("smoke test", output)

    def test_missing_contenders_are_reported(self):
        arguments = ("--shape", "8,8,8,2", "--operation", "forward", "--groups", "zipf")
        arguments += ("--contender", "jax_ep", "--contender", "torch", "--require-all")
        with unittest.mock.patch.dict(sys.modules, {"torch": None}):  # not even if it is installed
            status, output, results = smoke("matmul", *arguments)
        self.assertEqual(status, 1)
        reasons = {gap["contender"]: gap["reason"] for gap in results["missing"]}
        self.assertIn("ModuleNotFoundError", reasons["torch"])
        self.assertEqual(reasons["dense"], "it was not run")
        self.assertNotIn("jax_ep", reasons)
        self.assertRegex(output, "missing in 1 of 1 cases: torch: ModuleNotFoundError")

    def test_a_second_without_warming_up(self):
        parser = argparse.ArgumentParser()
        matmul.add_arguments(parser)
        self.assertEqual(parser.parse_args([]).iterations * timing.BURST_SECONDS, 1)
        operands = cases.make_operands(SHAPE, cases.group_sizes(SHAPE, "balanced"), 0)
        comparison = matmul.Comparison(cases.Case(SHAPE, "balanced", "forward"), operands, 7, {})
        with unittest.mock.patch.object(timing, "device_times", return_value=[1.0]) as timed:
            comparison.measure(contenders.Dense())
        _, _, iterations, _, warm_up_seconds = timed.call_args.args
        self.assertEqual((iterations, warm_up_seconds), (7, 0))

    def test_a_round_after_an_error_leaves_it(self):
        measurements = {}
        started = measure.Started(lambda x: x, [0])
        measure.measure(measurements, "a", unittest.mock.Mock(side_effect=ValueError("no")), 1)
        with unittest.mock.patch.multiple(timing, **QUICK):
            measure.measure(measurements, "a", lambda: started, 1)
        self.assertEqual(measurements, {"a": {"error": "ValueError: no"}})

    def test_a_wrong_result_is_no_result(self):
        class Wrong(contenders.RaggedDot):
            def computation(self, operation):
                return lambda x: super(Wrong, self).computation(operation)(x) * jnp.bfloat16(1.1)

        operands = cases.make_operands(SHAPE, cases.group_sizes(SHAPE, "balanced"), 0)
        case = cases.Case(SHAPE, "balanced", "forward")
        comparison = matmul.Comparison(case, operands, 1, {})
        with unittest.mock.patch.multiple(timing, **QUICK):
            comparison.measure(contenders.Ours())
            comparison.measure(Wrong())
        self.assertIn("rounds", comparison.measurements["jax_ep"])
        self.assertRegex(
            comparison.measurements["lax.ragged_dot"]["error"], "differs from that of jax_ep by 0.1"
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

    def test_nan_is_a_difference(self):
        class Nan(contenders.RaggedDot):
            def computation(self, operation):
                return lambda x: super(Nan, self).computation(operation)(x).at[-1, -1].set(jnp.nan)

        operands = cases.make_operands(SHAPE, cases.group_sizes(SHAPE, "balanced"), 0)
        comparison = matmul.Comparison(cases.Case(SHAPE, "balanced", "forward"), operands, 1, {})
        with unittest.mock.patch.multiple(timing, **QUICK):
            comparison.measure(contenders.Ours())
            comparison.measure(Nan())
        self.assertRegex(
            comparison.measurements["lax.ragged_dot"]["error"], "differs from that of jax_ep by nan"
        )

    def test_tokamax_configurations_are_tried_once_for_a_shape(self):
        tried = []

        def start(self, operation, operands, config):
            tried.append(config)
            if config == self.configs[-1]:
                raise ValueError("does not fit")
            started = measure.start_jax(lambda x: x.lhs, operands)
            started.facts["config"] = config
            return started

        operands = cases.make_operands(SHAPE, cases.group_sizes(SHAPE, "balanced"), 0)
        contender = peers.TokamaxMosaic()
        with (
            unittest.mock.patch.object(peers.TokamaxMosaic, "_start", start),
            unittest.mock.patch.multiple(timing, **QUICK),
        ):
            fastest = contender.start("forward", operands).facts["config"]
            self.assertEqual(tried, [None, *contender.configs])
            contender.start("forward", operands)
            self.assertEqual(tried[-1], fastest)
            self.assertLen(tried, 2 + len(contender.configs))

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
