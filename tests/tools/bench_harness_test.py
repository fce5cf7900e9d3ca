"""The harness of `python -m jax_ep.bench`: cases, interleaved rounds, and what a result needs."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import tempfile
import threading
import unittest.mock

import matplotlib.figure
from absl.testing import absltest, parameterized
from bench_command import QUICK

from jax_ep.bench.common import harness, report, timing
from jax_ep.bench.common.benchmark import Benchmark, Case, Started
from jax_ep.bench.common.comparison import start_early


@dataclasses.dataclass(frozen=True)
class Shape:
    tokens: int
    hidden: int

    def __str__(self):
        return f"{self.tokens}, {self.hidden}"


@dataclasses.dataclass
class Fake:
    """A provider whose calls take no time; `start` may raise."""

    name: str
    operations: tuple[str, ...] = ("forward", "backward")
    error: Exception | None = None
    repeats: int = 1

    def start(self, case, problem):
        if self.error is not None:
            raise self.error
        return Started(lambda x: x, [0], repeats=self.repeats, facts={"fact": self.name})


class FakeBenchmark(Benchmark):
    name = "fake"
    operations = ("forward", "backward")
    providers = (Fake("dense"), Fake("jax_ep"), Fake("torch", ("forward",)))
    shape_type = Shape
    shapes = (Shape(1, 8), Shape(2, 8))
    smoke_shapes = shapes
    variants = ("balanced", "zipf")
    variant_option = "groups"
    figures = (report.Figure("rate", "1/s"),)
    average = "mean"
    rounds = 2
    interleaved = ("dense",)
    sweep = "tokens"

    def make_problem(self, shape, variant, rotated_bytes):
        return None

    def add_figures(self, results):
        for record in results["cases"]:
            for measurement in record["measurements"].values():
                if "seconds" in measurement:
                    measurement["rate"] = 1 / measurement["seconds"]

    def required(self, record):
        return (("jax_ep",), ("torch", "tokamax"))


def parsed(*arguments):
    """The arguments of a command, with its default shapes."""
    parser = argparse.ArgumentParser()
    harness.add_arguments(parser, FakeBenchmark())
    namespace = parser.parse_args(list(arguments))
    namespace.shape = namespace.shape or list(FakeBenchmark.shapes)
    return namespace


class CasesTest(parameterized.TestCase):
    def test_all_combinations(self):
        """Uneven variants for the first shape alone, unless they are asked for."""
        cases = harness.chosen_cases(FakeBenchmark(), parsed())
        self.assertEqual(
            [case.record()["key"] for case in cases],
            [
                f"{operation}/{shape}/{variant}"
                for shape, variant in (("1, 8", "balanced"), ("1, 8", "zipf"), ("2, 8", "balanced"))
                for operation in ("forward", "backward")
            ],
        )
        arguments = parsed("--groups", "zipf", "--operation", "forward", "--shape", "3,4")
        (case,) = harness.chosen_cases(FakeBenchmark(), arguments)
        self.assertEqual(case, Case("forward", Shape(3, 4), "zipf"))
        self.assertEqual(case.record()["sizes"], {"tokens": 3, "hidden": 4})
        chained = dataclasses.replace(case, chained=8)
        self.assertEqual(chained.record()["key"], "forward/3, 4/zipf/8 chained")

    @parameterized.parameters("1", "1,2,3", "a,b", "1,0", "")
    def test_what_is_no_shape(self, text):
        with self.assertRaisesRegex(argparse.ArgumentTypeError, "TOKENS,HIDDEN"):
            harness.parse_shape(Shape, text)

    def test_no_provider_for_the_operation(self):
        arguments = parsed("--provider", "torch", "--operation", "backward")
        with self.assertRaisesRegex(SystemExit, "torch cannot backward"):
            harness.chosen_cases(FakeBenchmark(), arguments)

    def test_interleaved_rounds(self):
        case = lambda operation: Case(operation, Shape(1, 8), "balanced")
        names = lambda operation: [
            p.name for p in harness.schedule(FakeBenchmark(), parsed(), case(operation))
        ]
        rounds = ["dense", "jax_ep", "dense", "jax_ep", "dense"]
        self.assertEqual(names("forward"), [*rounds, "torch"])
        self.assertEqual(names("backward"), rounds)


class ComparisonTest(parameterized.TestCase):
    def comparison(self):
        case = Case("forward", Shape(1, 8), "balanced")
        return harness.Comparison(FakeBenchmark(), case, None, 3, {})

    def test_rounds_of_one_compilation(self):
        comparison, provider = self.comparison(), Fake("jax_ep", repeats=20)
        with (
            unittest.mock.patch.object(timing, "device_times", lambda *_: [20.0, 40.0, 120.0]),
            unittest.mock.patch.object(
                Fake, "start", autospec=True, side_effect=Fake.start
            ) as start,
        ):
            comparison.measure(provider)
            comparison.measure(provider)
        self.assertEqual(start.call_count, 1)
        times = {"mean": 3.0, "median": 2.0, "minimum": 1.0, "maximum": 6.0, "iterations": 3}
        self.assertEqual(
            comparison.measurements["jax_ep"], {"facts": {"fact": "jax_ep"}, "rounds": [times] * 2}
        )

    def test_an_error_stays(self):
        comparison = self.comparison()
        with unittest.mock.patch.multiple(timing, **QUICK):
            comparison.measure(Fake("torch", error=ValueError("no")))
            comparison.measure(Fake("torch"))
        self.assertEqual(comparison.measurements, {"torch": {"error": "ValueError: no"}})

    def test_programs_start_side_by_side(self):
        """Each waits for the others; an error is that of its provider alone."""
        barrier = threading.Barrier(3, timeout=60)

        class Slow(Fake):
            def start(self, case, problem):
                barrier.wait()
                return super().start(case, problem)

        providers = Slow("jax_ep"), Slow("dense"), Slow("torch", error=ValueError("no"))
        comparison = self.comparison()
        start_early([(comparison, provider) for provider in providers])
        with (
            unittest.mock.patch.multiple(timing, **QUICK),
            unittest.mock.patch.object(Slow, "start", side_effect=AssertionError("again")),
        ):
            for provider in providers:
                comparison.measure(provider)
        self.assertEqual(comparison.measurements.pop("torch"), {"error": "ValueError: no"})
        for measurement in comparison.measurements.values():
            self.assertLen(measurement["rounds"], 1)
            self.assertGreaterEqual(measurement["facts"]["start_seconds"], 0)
        self.assertEqual(set(comparison.wall), {"programs", "first calls", "checks", "timing"})

    def test_the_clocks_settle_once(self):
        comparison = self.comparison()
        with (
            unittest.mock.patch.object(timing, "device_times", return_value=[1.0]) as timed,
            unittest.mock.patch.object(FakeBenchmark, "settling_seconds", 5),
        ):
            for name in "jax_ep", "dense", "jax_ep":
                comparison.measure(Fake(name))
        given = [call.args[2::2] for call in timed.call_args_list]  # iterations, warm_up_seconds
        self.assertEqual(given, [(1, 5), *[(3, None)] * 3])

    def test_the_fastest_of_several(self):
        seconds = {"slow": 2.0, "fast": 1.0}

        def fail(_):
            raise ValueError("it does not fit")

        class Several(Fake):
            def start(self, case, problem):
                calls = {name: lambda x, name=name: name for name in seconds} | {"none": fail}
                return [
                    Started(call, [0], lambda result: lambda: result, facts={"is": name})
                    for name, call in calls.items()
                ]

        comparison = self.comparison()
        timed = lambda call, arguments, *_: [seconds[call(arguments[0])]]
        with unittest.mock.patch.object(timing, "device_times", timed):
            comparison.measure(Several("tokamax"))
        measurement = comparison.measurements["tokamax"]
        self.assertEqual((measurement["facts"], len(measurement["rounds"])), ({"is": "fast"}, 1))


class SummaryTest(absltest.TestCase):
    def results(self, **rounds):
        """Results of two cases with rounds of these means, or with an error."""
        records = [case.record() for case in harness.chosen_cases(FakeBenchmark(), parsed())[:2]]
        for record in records:
            record["measurements"] = {
                name: {"error": given} if isinstance(given, str)
                else {"rounds": [{"mean": s, "minimum": s, "maximum": s} for s in given]}
                for name, given in rounds.items()
            }  # fmt: skip
        results = {"cases": records, "smoke": False}
        harness.summarize(FakeBenchmark(), results)
        harness.summarize(FakeBenchmark(), results)  # as after every measurement
        return results

    def test_the_first_of_several_rounds_does_not_count(self):
        results = self.results(dense=[9.0, 0.8, 1.2], jax_ep=[9.0, 2.0], torch=[3.0])
        measurements = results["cases"][0]["measurements"]
        self.assertEqual([m["seconds"] for m in measurements.values()], [1, 2, 3])
        self.assertEqual([m["jax_ep_speedup"] for m in measurements.values()], [0.5, 1, 1.5])
        self.assertEqual(measurements["torch"]["rate"], 1 / 3)
        self.assertEqual((results["missing"], results["counts"]), ([], True))

    def test_a_speedup_is_the_median_over_the_rounds(self):
        """With as many rounds as jax_ep's, which then took turns."""
        results = self.results(jax_ep=[9.0, 2.0, 4.0, 1.0], torch=[9.0, 1.0, 4.0, 9.0])
        measurement = results["cases"][0]["measurements"]["torch"]
        self.assertEqual((measurement["seconds"], measurement["jax_ep_speedup"]), (14 / 3, 1.0))

    def test_what_is_missing(self):
        """One of torch and tokamax is enough; the reason is told, and how often."""
        results = self.results(jax_ep=[1.0], torch="ModuleNotFoundError: no torch")
        results["cases"][0]["measurements"]["tokamax"] = {"rounds": [{"mean": 1.0}]}
        harness.summarize(FakeBenchmark(), results)
        self.assertEqual(
            results["missing"],
            [
                {"provider": "torch", "reason": "ModuleNotFoundError: no torch", "cases": 1},
                {"provider": "tokamax", "reason": "it was not run", "cases": 1},
            ],
        )
        self.assertFalse(results["counts"])

    def test_cells(self):
        measurement = self.results(jax_ep=[1e-6], torch=[2e-6])["cases"][0]["measurements"]["torch"]
        cells = report._cells("torch", measurement, FakeBenchmark.figures)
        self.assertEqual(cells, ["2.0", "2.0", "2.0", "5e+05", "2.00x"])
        self.assertEqual(report._cells("torch", {"error": "no"}, ()), ["error"])

    def test_lines_are_drawn_over_three_values_or_more(self):
        records = self.results(jax_ep=[1.0])["cases"][:1] * 4
        for tokens, variant in ((1, "balanced"), (2, "balanced"), (9, "balanced"), (1, "zipf")):
            record = Case("forward", Shape(tokens, 8), variant).record()
            records = [*records[1:], record | {"measurements": records[0]["measurements"]}]
        families = report._families(records, "tokens")
        self.assertEqual([f is None for f in families], [False, False, False, True])
        self.assertEqual(report._families(records, None), [None] * 4)
        results = {"cases": records, "benchmark": "fake", "num_devices": 1, "device": "cpu"}
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "plot.png")
            report.plot(results, FakeBenchmark.figures[:1], "tokens", path)
            self.assertStartsWith(path.read_bytes().decode("latin1"), "\x89PNG")

    def test_cases_are_in_the_panel_of_the_last_figure_that_they_have(self):
        figures = (report.Figure("rate", "rate"), report.Figure("read", "TB/s"))
        records = []
        for rows, measured in ((4096, {"rate": 3.0}), (8, {"rate": 0.1, "read": 2.0})):
            record = Case("forward", Shape(rows, 8), "balanced").record()
            records.append(record | {"measurements": {"torch": measured, "other": {}}})
        self.assertEqual([report._figure(r, figures).key for r in records], ["rate", "read"])
        self.assertEqual(report._figure(records[1], figures[:1]).key, "rate")
        results = {"cases": records, "benchmark": "fake", "num_devices": 1, "device": "cpu"}
        with tempfile.TemporaryDirectory() as folder:
            report.plot(results, figures, None, pathlib.Path(folder, "plot.png"))

    def test_lines_are_of_chained_calls(self):
        """Where a size has both; they say that sizes are of a rank."""
        records = []
        for tokens, chained, rate in ((9, 8, 5.0), (1, 64, 2.0), (1, 1, 1.0)):
            record = Case("forward", Shape(tokens, 8), "balanced", chained).record()
            records.append(record | {"measurements": {"torch": {"rate": rate}}})
        panel = matplotlib.figure.Figure().subplots()
        figure = FakeBenchmark.figures[0]
        report.draw_lines(panel, records, ["jax_ep", "torch"], figure, "tokens")
        (line,) = panel.get_lines()
        self.assertEqual(
            (line.get_label(), line.get_xydata().tolist()), ("torch", [[1, 2], [9, 5]])
        )
        self.assertEqual(panel.get_xlabel(), "tokens per rank")


if __name__ == "__main__":
    absltest.main()
