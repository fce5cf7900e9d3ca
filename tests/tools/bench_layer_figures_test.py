"""Figures of `python -m jax_ep.bench layer`: sums of parts, ratios, peaks and reading."""

from __future__ import annotations

import testing  # isort: skip  # noqa: F401  sets the devices

from absl.testing import absltest

from jax_ep.bench.common.benchmark import Case
from jax_ep.bench.common.report import OURS
from jax_ep.bench.layer import figures as layer_figures
from jax_ep.bench.layer import providers as layer_providers
from jax_ep.bench.layer.benchmark import BENCHMARK
from jax_ep.bench.layer.parts import DENSE, PARTS
from jax_ep.bench.layer.problem import Shape, make_problem
from jax_ep.bench.transfer.problem import make_mesh


def case_of(operation, shape, weights="bfloat16"):
    return Case(operation, shape, weights, 1)


class FiguresTest(absltest.TestCase):
    def figures(self, operation, shape, weights="bfloat16", peaks=None, **extra):
        case = case_of(operation, shape, weights)
        BENCHMARK.mesh = make_mesh(1)
        applying = [
            p for p in (*PARTS, *DENSE) if operation in p.operations and BENCHMARK.applies(p, case)
        ]

        def measurement(seconds, peak=None):
            return {"rounds": [{"mean": s} for s in (99.0, seconds)], "facts": {"peak_bytes": peak}}

        measurements = {p.name: measurement(1.0) for p in applying}
        for name in (OURS, layer_providers.KEEPING_ROWS, "torch"):
            measurements[name] = measurement(12.0, 2**30)
        for name, peak in (peaks or {}).items():
            measurements[name] = measurement(12.0, peak)
        for found in measurements.values():
            found["seconds"] = found["rounds"][1]["mean"]
        record = case.record() | {"measurements": measurements} | extra
        results = {"cases": [record], "copy_bytes_per_second": 1e9, "smoke": False}
        BENCHMARK.add_figures(results)
        return record

    def test_sums(self):
        shape = Shape(4096, 2048, 768, 32, 8)
        record = self.figures("forward", shape)
        self.assertEqual(
            record["sums"], {"of_sum": 4.0, "of_dense_sum": 5.0, "of_dense_matmuls": 4.0}
        )
        record = self.figures("both", shape, "float32")  # with a cast
        self.assertEqual(
            record["sums"], {"of_sum": 12.0, "of_dense_sum": 14.0, "of_dense_matmuls": 12.0}
        )
        measurement = record["measurements"][OURS]
        self.assertEqual((measurement["of_sum"], measurement["peak_gib"]), (1.0, 1.0))
        flops = 3 * 2 * 32768 * 3 * 2048 * 768
        self.assertAlmostEqual(measurement["tflops"], flops / 12 / 1e12)
        keeping = record["measurements"][layer_providers.KEEPING_ROWS]
        self.assertAlmostEqual(keeping["of_sum"], 12 / 11)  # without the second dispatch
        self.assertNotIn("of_sum", record["measurements"]["part: up"])

    def test_a_ratio_is_the_median_over_the_rounds(self):
        rounds = lambda *seconds: {"rounds": [{"mean": s} for s in seconds], "seconds": 1.0}
        case = case_of("forward", Shape(16, 2048, 768, 32, 8))
        applying = [p for p in (*PARTS, *DENSE) if "forward" in p.operations]
        applying = [p for p in applying if p.applies(case.shape, "bfloat16", 1)]
        measured = {p.name: rounds(9, 1, 2, 1) for p in applying}  # four parts
        measured[OURS] = rounds(9, 8, 8, 4, 9)  # of the last round the parts are missing
        record = {"measurements": measured}
        layer_figures.add_ratios(record, case, applying, 1e9)
        self.assertEqual(measured[OURS]["of_sum"], 1.0)  # of 2, 1 and 1
        self.assertEqual(record["sums"]["of_sum"], 16 / 3)

    def test_rounds_have_orders_of_their_own(self):
        chosen = list(BENCHMARK.providers)[:12]
        order = BENCHMARK.order(chosen)
        rounds = [order[i : i + 12] for i in range(0, len(order), 12)]
        self.assertEqual(rounds[0], chosen)  # jax_ep's results are the first
        self.assertLen({tuple(p.name for p in each) for each in rounds}, BENCHMARK.rounds)
        for each in rounds:
            self.assertCountEqual(each, chosen)

    def test_peaks(self):
        plain, einsum = "sort, lax.ragged_dot, gather", "einsum, capacity 1.25"
        peaks = {plain: 2**29, einsum: 2**20}
        record = self.figures("forward", Shape(4096, 2048, 768, 32, 8), peaks=peaks)
        self.assertEqual(record["measurements"][OURS]["of_plain_peak"], 2)
        self.assertNotIn("of_plain_peak", record["measurements"][plain])

    def test_reading(self):
        shape = Shape(16, 2048, 768, 32, 8)
        record = self.figures("forward", shape, active_experts=20)
        self.assertEqual(set(record["sums"]), {"of_sum", "of_reading"})
        self.assertAlmostEqual(record["sums"]["of_reading"], 2 + 20 * 3 * 2048 * 768 * 2 / 1e9)

    def test_active_experts(self):
        problem = make_problem(make_mesh(4), Shape(1, 32, 16, 2, 2), "bfloat16", 0)
        busiest = max(
            len({e for e in range(8) if e // 2 == r} & set(problem.routes.topk_ids.ravel()))
            for r in range(4)
        )
        self.assertEqual(problem.active_experts, busiest)


if __name__ == "__main__":
    absltest.main()
