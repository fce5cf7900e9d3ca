"""`python -m jax_ep.bench transfer`: who is compared and how, what is made of times, and what is written."""

from __future__ import annotations

import unittest.mock

import testing  # isort: skip

import jax
import numpy as np
from absl.testing import absltest, parameterized
from bench_command import run, smoke
from programs import lower_for_cuda
from transfers import problem_of

from jax_ep.bench import ceiling, measure, transfer_cases, transfer_contenders, transfer_plot
from jax_ep.bench import transfer_report as report
from jax_ep.bench.transfer_cases import Case, Shape
from jax_ep.bench.transfer_contenders import AllToAll, GatherScatter, Ours
from jax_ep.bench.transfer_problem import sharded


class ContendersTest(parameterized.TestCase):
    @parameterized.product(ranks=(1, 4), operation=transfer_cases.OPERATIONS, chained=(1, 3))
    def test_ours_is_checked(self, ranks, operation, chained):
        started = Ours(num_sms=4).start(operation, problem_of(ranks), chained)
        self.assertEqual((started.facts["checked"], started.facts["num_sms"]), (True, 4))

    @parameterized.parameters(*transfer_cases.OPERATIONS)
    def test_a_wrong_result_is_no_result(self, operation):
        one_element, order = lambda a: a.at[0, 0].multiply(1.02), lambda a: a[::-1]
        wrongs = [one_element, order]
        if operation != "combine":
            wrongs = [
                *(lambda r, f=f: r._replace(rows=f(r.rows)) for f in wrongs),
                lambda r: r._replace(row_weights=r.row_weights.at[0].multiply(1.001)),
                lambda r: r._replace(group_sizes=r.group_sizes.at[0].add(1)),
            ]
        problem = problem_of()
        for wrong in wrongs:

            class Wrong(Ours):
                def transfer(self, name, problem, wrong=wrong):
                    right = super().transfer(name, problem)
                    return (lambda *a: wrong(right(*a))) if name == operation else right

            measurements = {}
            start = lambda: Wrong().start(operation, problem, 1)
            measure.measure(measurements, "jax_ep", start, 1)
            self.assertRegex(measurements["jax_ep"]["error"], r"ArithmeticError: \w+ is wrong: ")

    @parameterized.parameters(*transfer_cases.OPERATIONS)
    def test_ours_is_one_custom_call_on_cuda(self, operation):
        """The one that is demanded as evidence, with the limit of multiprocessors."""
        problem = problem_of()
        arguments = Ours()._arguments(operation, problem)[0]
        with unittest.mock.patch.object(jax, "default_backend", lambda: "gpu"):
            ours = sharded(Ours(24).transfer(operation, problem), problem.mesh)
            text = lower_for_cuda(ours, *arguments).text
        self.assertEqual(text.count("custom_call @jax_ep"), 1)
        self.assertEqual(text.count(f"custom_call @jax_ep.{operation}.v1("), 1)
        self.assertIn("num_sms = 24", text)

    def test_ceiling_is_one_custom_call_on_cuda(self):
        problem = problem_of()
        rows = problem.fill(5)[0]
        text = lower_for_cuda(sharded(ceiling.send_to_all, problem.mesh), rows).text
        self.assertEqual(text.count("custom_call @jax_ep"), 1)
        self.assertIn(f"custom_call @{ceiling.TARGET}(", text)
        self.assertIn(f"repeats = {ceiling.REPEATS}", text)
        self.assertIn("(tensor<5x16xbf16>) -> tensor<1xi32>", text)

    def test_ceiling_is_of_several_gpus(self):
        measurements = {}
        start = lambda: ceiling.Ceiling().start("dispatch", problem_of(), 1)
        measure.measure(measurements, "ceiling", start, 1)
        self.assertRegex(measurements["ceiling"]["error"], "bulk copies need GPUs")

    def test_collectives(self):
        """Their results are what their names say, of as many bytes as they should be."""
        problem = problem_of()
        x = np.split(np.asarray(problem.sets[0].x, np.float32), 4)
        gathered = GatherScatter().start("dispatch", problem, 1)
        testing.assert_bitwise(
            gathered.call(gathered.arguments[0]), np.tile(problem.sets[0].x, (4, 1))
        )
        scattered = GatherScatter().start("combine", problem, 1)
        sums = np.tile(sum(x), (4, 1))  # every rank holds its own tokens for each of the 4
        testing.assert_close(scattered.call(scattered.arguments[0]), sums)
        exchanged = AllToAll().start("dispatch", problem, 1)
        self.assertEqual(exchanged.arguments[0][0].shape, (4 * 4 * 7, 16))  # 27 rows in 4 parts
        per_peer = [np.resize(part, (4, 7, 16)) for part in x]
        expected = np.concatenate([part[peer] for peer in range(4) for part in per_peer])
        testing.assert_close(exchanged.call(exchanged.arguments[0]), expected, steps=0)


class ReportTest(absltest.TestCase):
    def results(self, operation="dispatch", tokens=(9,), **medians):
        cases = []
        for number in tokens:
            problem = problem_of(shape=Shape(number, 16, 8, 3))
            record = report.new_record(Case(problem.shape, "zipf", operation, 1), problem)
            for name, seconds in medians.items():
                times = {"median": seconds, "minimum": seconds, "maximum": seconds}
                record["measurements"][name] = {"facts": {}, "rounds": [times]}
            cases.append(record)
        results = {"cases": cases, "smoke": False, "ranks": 4, "device": "cpu"}
        report.add_figures(results)
        return results

    def test_ratios(self):
        results = self.results(jax_ep=2e-6, ceiling=1e-6, **{"lax.all_to_all": 5e-6})
        ours, ceiling, other = results["cases"][0]["measurements"].values()
        nbytes = results["cases"][0]["remote_bytes"]
        self.assertAlmostEqual(ours["gigabytes_per_second"], nbytes / 2000)
        self.assertAlmostEqual(other["gigabytes_per_second"], nbytes / 5000)
        self.assertEqual([round(m["of_ceiling"], 9) for m in (ours, ceiling, other)], [0.5, 1, 0.2])
        self.assertAlmostEqual(other["jax_ep_speedup"], 2.5)
        without = self.results(jax_ep=2e-6)["cases"][0]["measurements"]["jax_ep"]
        self.assertIsNone(without["of_ceiling"])
        cells = [report._cells("x", m)[4] for m in (ours, without)]
        self.assertEqual(cells, ["0.50", ""])

    def test_counts(self):
        names = [names[-1] for names in report.REQUIRED]
        everyone = dict.fromkeys(names, 1.0)
        self.assertTrue(self.results(**everyone)["counts"])
        for name in names:
            results = self.results(**{n: 1.0 for n in names if n != name})
            self.assertFalse(results["counts"])
            self.assertIn(name, [gap["contender"] for gap in results["missing"]])
        self.assertTrue(self.results("redispatch", jax_ep=1, ceiling=1)["counts"])
        self.assertFalse(self.results("redispatch", jax_ep=1)["counts"])

    def test_columns_of_the_plot(self):
        draw = [column[1] for column in transfer_plot._columns(self.results(jax_ep=1)["cases"])]
        self.assertEqual(draw, [transfer_plot._draw_bars])
        results = self.results(tokens=(1, 2, 9), jax_ep=1)
        draw = [column[1] for column in transfer_plot._columns(results["cases"])]
        self.assertEqual(draw, [transfer_plot._draw_sweep])


class CommandTest(absltest.TestCase):
    def test_smoke(self):
        status, output, results = smoke("transfer", "--devices", "4")
        self.assertEqual(status, 0, output)
        self.assertEqual((results["ranks"], results["counts"]), (4, False))
        self.assertLen(results["cases"], 3 * (2 + 2))  # two routings; few tokens singly, too
        self.assertEqual({record["chained"] for record in results["cases"]}, {1, 8, 64})
        for record in results["cases"]:
            measurements = record["measurements"]
            by_plan = record["operation"] == "redispatch"
            self.assertEqual(tuple(measurements), transfer_contenders.NAMES[: 2 if by_plan else 6])
            for name, measurement in measurements.items():
                if name == "ceiling":
                    self.assertIn("bulk copies need GPUs", measurement["error"])
                    continue
                if name.startswith("lax.ragged"):
                    self.assertIn("not supported by XLA:CPU", measurement["error"])
                    continue
                times = measurement["rounds"][0]
                self.assertLessEqual(0, times["minimum"])
                self.assertLessEqual(times["minimum"], measurement["seconds"])
                self.assertLessEqual(measurement["seconds"], times["maximum"])
                rate = record["remote_bytes"] / measurement["seconds"] / 1e9
                self.assertAlmostEqual(measurement["gigabytes_per_second"], rate)
                self.assertGreater(rate, 0)
            self.assertIs(measurements["jax_ep"]["facts"]["checked"], True)
        self.assertIn("redispatch on 4 x cpu", output)
        self.assertRegex(
            output,
            "missing in 12 of 12 cases: ceiling: NotImplementedError: bulk copies need GPUs",
        )

    def test_another_contender(self):
        """The report compares all with whoever is called "ceiling"."""

        class Ceiling(AllToAll):
            name = "ceiling"

        arguments = ("--devices", "2", "--operation", "dispatch", "--shape", "300,16,4,2")
        arguments += ("--num-sms", "2", "--num-sms", "3", "--require-all")
        with unittest.mock.patch.object(transfer_contenders, "CONTENDERS", (Ours(), Ceiling())):
            status, output, results = smoke("transfer", *arguments)
        self.assertEqual(status, 1)
        names = ["jax_ep", "jax_ep 2 SMs", "jax_ep 3 SMs", "ceiling"]
        for record in results["cases"]:
            self.assertEqual(list(record["measurements"]), names)
            for measurement in record["measurements"].values():
                ceiling = record["measurements"]["ceiling"]["seconds"]
                self.assertAlmostEqual(measurement["of_ceiling"], ceiling / measurement["seconds"])
        self.assertNotIn("ceiling: it was not run", output)
        self.assertIn("lax.all_to_all: it was not run", output)

    def test_what_does_not_fit(self):
        for arguments, message in (
            (("--devices", "99"), "--devices 99 is more than the 8 devices"),
            (("--devices", "4", "--shape", "1,8,6,2"), "do not divide over 4 devices"),
            (
                ("--contender", "lax.all_to_all", "--operation", "redispatch"),
                "lax.all_to_all cannot redispatch",
            ),
        ):
            with self.assertRaisesRegex(SystemExit, message):
                run("transfer", "--smoke", *arguments)
        status, output = run("transfer")
        self.assertEqual(status, 2)
        self.assertIn("There is no GPU", output)


if __name__ == "__main__":
    absltest.main()
