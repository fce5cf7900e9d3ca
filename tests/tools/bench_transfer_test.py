"""`python -m jax_ep.bench transfer`: its routes, providers and figures, and a smoke run."""

from __future__ import annotations

import argparse
import dataclasses
import unittest.mock

import testing  # isort: skip

import jax
import numpy as np
from absl.testing import absltest, parameterized
from bench_command import SHAPE, ragged_all_to_all, run, smoke, transfer_problem_of
from programs import lower_for_cuda

from jax_ep.bench.common import harness
from jax_ep.bench.common.benchmark import Case
from jax_ep.bench.common.programs import sharded
from jax_ep.bench.transfer import benchmark as transfer
from jax_ep.bench.transfer import providers
from jax_ep.bench.transfer.benchmark import BENCHMARK
from jax_ep.bench.transfer.problem import (
    ROUTINGS,
    Routes,
    Shape,
    choose_experts,
    make_mesh,
    make_problem,
)
from jax_ep.bench.transfer.providers import Ours, ragged_operands

RANKS = (1, 2, 4)
CASES = {operation: Case(operation, SHAPE, "zipf") for operation in providers.OPERATIONS}
BY_NAME = {provider.name: provider for provider in providers.PROVIDERS}


class CasesTest(absltest.TestCase):
    def test_sweep_and_chains(self):
        arguments = argparse.Namespace(
            smoke=False, sweep=True, devices=1, domain_size=None, shape=list(BENCHMARK.shapes)
        )
        BENCHMARK.prepare(arguments, {})
        self.assertLen(arguments.shape, 3 + 8)  # the first is one of the sweep
        singly = [shape.tokens for shape in arguments.shape if 1 in BENCHMARK.chains(shape)]
        self.assertEqual(singly, [1, 8, 32, 128])
        self.assertEqual(BENCHMARK.chains(BENCHMARK.shapes[0]), (8,))

    def test_experts_are_distinct(self):
        with self.assertRaisesRegex(argparse.ArgumentTypeError, "distinct"):
            harness.parse_shape(Shape, "1,8,2,3")


def received_by(routes, rank):
    """The assignment of each row that a rank receives, in the order of dispatch."""
    by_expert = np.argsort(routes.topk_ids.ravel(), kind="stable")
    return by_expert[routes.destinations.ravel()[by_expert] == rank]


class RoutesTest(parameterized.TestCase):
    @parameterized.product(ranks=RANKS, routing=ROUTINGS)
    def test_against_loops(self, ranks, routing):
        ids = choose_experts(SHAPE, ranks, routing)
        self.assertEqual((ids.dtype, ids.shape), (np.int32, (ranks, 9, 3)))
        np.testing.assert_array_equal(ids, choose_experts(SHAPE, ranks, routing))
        routes, local = Routes(ids, SHAPE.experts), SHAPE.experts // ranks
        counts = np.zeros((2, ranks, ranks), int)
        pairs, received = set(), [[] for _ in range(ranks)]
        for source in range(ranks):
            for token in range(9):
                chosen = ids[source, token].tolist()
                self.assertLen(set(chosen), 3)
                for k, expert in enumerate(chosen):
                    rank = expert // local
                    counts[0, source, rank] += 1
                    pairs.add((source, token, rank))
                    received[rank].append((expert, source, token, k))
        for source, _, rank in pairs:
            counts[1, source, rank] += source != rank
        np.testing.assert_array_equal(routes.counts, counts[0])
        self.assertEqual(routes.recv_capacity, max(map(len, received)))
        self.assertEqual(routes.busiest_pairs, max(counts[1].sum(0).max(), counts[1].sum(1).max()))
        for rank in range(ranks):
            expected = [(s * 9 + t) * 3 + k for _, s, t, k in sorted(received[rank])]
            self.assertEqual(received_by(routes, rank).tolist(), expected)
            by_expert = sorted((e, t) for t in range(9) for e in ids[rank, t])
            self.assertEqual(routes.sent_tokens()[rank].tolist(), [t for _, t in by_expert])

    def test_the_busiest_may_be_a_receiver(self):
        ids = np.array([[[2, 3], [2, 0]], [[4, 5], [0, 2]], [[2, 3], [3, 4]]], np.int32)
        # Rank 1 (experts 2, 3) gets 2 tokens of rank 0 and 2 of rank 2; nobody sends more than 2.
        self.assertEqual(Routes(ids, 6).busiest_pairs, 4)

    @parameterized.parameters(*ROUTINGS)
    def test_drawn_without_replacement(self, routing):
        """How often an expert is among two choices: drawn first, or second after another."""
        ids = choose_experts(Shape(40000, 1, 5, 2), 1, routing)
        p = np.arange(1, 6) ** (-1.2 if routing == "zipf" else 0.0)
        p /= p.sum()
        expected = p + [sum(p[j] * p[i] / (1 - p[j]) for j in range(5) if j != i) for i in range(5)]
        measured = np.sort(np.bincount(ids.ravel()) / 40000)[::-1]
        np.testing.assert_allclose(measured, expected, atol=0.012)  # 5 standard deviations

    def test_operands(self):
        problem = make_problem(
            make_mesh(4), SHAPE, "balanced", 1000
        )  # 288 bytes of tokens per rank
        self.assertLen(problem.sets, 4)
        self.assertLen(make_problem(make_mesh(4), SHAPE, "balanced", 1e6).sets, 16)
        self.assertEqual([a.shape for a in problem.sets[0]], [(36, 16), (36, 3), (36, 3)])
        self.assertFalse(np.array_equal(problem.sets[0].x, problem.sets[1].x))
        self.assertEqual(problem.remote_bytes, problem.routes.busiest_pairs * 32)


class RaggedTest(parameterized.TestCase):
    @parameterized.product(ranks=RANKS, updates=(1, 64), tokens=(1, 9, 100))
    def test_every_row_arrives_once_and_comes_back(self, ranks, updates, tokens):
        shape = Shape(tokens, 16, 8, 3)
        routes = Routes(choose_experts(shape, ranks, "zipf"), 8)
        assignments = np.arange(routes.topk_ids.size).reshape(ranks, -1)
        order = np.argsort(routes.topk_ids.reshape(ranks, -1), axis=1, kind="stable")
        sent = list(np.take_along_axis(assignments, order, 1))
        there = [np.full(n, -1) for n in routes.counts.sum(0)]
        for written in ragged_all_to_all(sent, there, *ragged_operands(routes.counts, updates)):
            np.testing.assert_array_equal(written, 1)
        experts = routes.topk_ids.ravel()
        for rank, arrived in enumerate(there):
            self.assertEqual(sorted(arrived), sorted(received_by(routes, rank)))
            np.testing.assert_array_equal(experts[arrived] // (8 // ranks), rank)
        home = [np.full(tokens * 3, -1) for _ in range(ranks)]
        ragged_all_to_all(there, home, *ragged_operands(routes.counts.T, updates))
        np.testing.assert_array_equal(home, sent)
        _, send_sizes, *_ = ragged_operands(routes.counts, updates)
        sizes = send_sizes.reshape(ranks, ranks, updates)
        self.assertLessEqual((sizes.max(2) - sizes.min(2)).max(), 1)  # nearly equal updates

    @parameterized.parameters(1, 64)
    def test_the_rows_that_are_sent(self, updates):
        """The program's own arguments, by the simulation; and it lowers for CUDA."""
        problem = transfer_problem_of()
        _, arguments, _ = providers.ragged_all_to_all(updates, "dispatch", problem)
        rows, *operands = (np.split(np.asarray(a), 4) for a in arguments[0])
        outputs = [np.zeros((problem.routes.recv_capacity, 16), rows[0].dtype) for _ in range(4)]
        ragged_all_to_all(rows, outputs, *operands)
        x = np.asarray(problem.sets[0].x)
        for rank, output in enumerate(outputs):
            expected = x[received_by(problem.routes, rank) // SHAPE.top_k].astype(np.float32)
            arrived = output[: len(expected)].astype(np.float32)
            self.assertCountEqual(arrived.tolist(), expected.tolist())
        for operation in ("dispatch", "combine"):
            transfer, arguments, _ = providers.ragged_all_to_all(updates, operation, problem)
            program = lower_for_cuda(sharded(transfer, problem.mesh), *arguments[0])
            self.assertEqual(program.text.count("call @ragged_all_to_all"), 1)


class ProvidersTest(parameterized.TestCase):
    @parameterized.product(ranks=(4, 1), operation=providers.OPERATIONS, chained=(1, 3))
    def test_ours_is_checked(self, ranks, operation, chained):
        case = dataclasses.replace(CASES[operation], chained=chained)
        started = Ours(num_sms=4).start(case, transfer_problem_of(ranks))
        self.assertEqual((started.facts["checked"], started.facts["num_sms"]), (True, 4))

    @parameterized.parameters(*providers.OPERATIONS)
    def test_a_wrong_result_is_no_result(self, operation):
        one_element, order = lambda a: a.at[0, 0].multiply(1.02), lambda a: a[::-1]
        wrongs = [one_element, order]
        if operation != "combine":
            wrongs = [
                *(lambda r, f=f: dataclasses.replace(r, rows=f(r.rows)) for f in wrongs),
                lambda r: dataclasses.replace(r, row_weights=r.row_weights.at[0].multiply(1.001)),
                lambda r: dataclasses.replace(r, group_sizes=r.group_sizes.at[0].add(1)),
            ]
        problem = transfer_problem_of()
        for wrong in wrongs:

            class Wrong(Ours):
                def transfers(self, problem, implementation, wrong=wrong):
                    right = super().transfers(problem, implementation)
                    if implementation == "xla":
                        return right
                    changed = lambda *a: wrong(right[operation](*a))
                    return right | {operation: changed}

            with self.assertRaisesRegex(ArithmeticError, f"{operation} is wrong: "):
                Wrong().start(CASES[operation], problem)

    @parameterized.parameters(*providers.OPERATIONS)
    def test_ours_is_one_custom_call_on_cuda(self, operation):
        """The one that is demanded as evidence, with the limit of SMs."""
        problem = transfer_problem_of()
        arguments = Ours().arguments(operation, problem)[0]
        with unittest.mock.patch.object(jax, "default_backend", lambda: "gpu"):
            ours = sharded(Ours(24).transfers(problem, "cuda")[operation], problem.mesh)
            text = lower_for_cuda(ours, *arguments).text
        self.assertEqual(text.count("custom_call @jax_ep"), 1)
        self.assertEqual(text.count(f"custom_call @jax_ep.{operation}.v1("), 1)
        self.assertIn("num_sms = 24", text)

    def test_ceiling_is_one_custom_call_on_cuda(self):
        problem = transfer_problem_of()
        rows = problem.fill(5)[0]
        text = lower_for_cuda(sharded(providers.send_to_all, problem.mesh), rows).text
        self.assertEqual(text.count("custom_call @jax_ep"), 1)
        self.assertIn(f"custom_call @{providers.CEILING_TARGET}(", text)
        self.assertIn(f"repeats = {providers.CEILING_REPEATS}", text)
        self.assertIn("(tensor<5x16xbf16>) -> tensor<1xi32>", text)

    def test_ceiling_is_of_several_gpus(self):
        with self.assertRaisesRegex(NotImplementedError, "bulk copies need GPUs"):
            BY_NAME["ceiling"].start(CASES["dispatch"], transfer_problem_of())

    def test_collectives(self):
        """Their results are what their names say, of as many bytes as they should be."""
        problem = transfer_problem_of()
        x = np.split(np.asarray(problem.sets[0].x, np.float32), 4)
        gathered = BY_NAME["all_gather/psum_scatter"].start(CASES["dispatch"], problem)
        testing.assert_bitwise(
            gathered.call(gathered.arguments[0]), np.tile(problem.sets[0].x, (4, 1))
        )
        scattered = BY_NAME["all_gather/psum_scatter"].start(CASES["combine"], problem)
        sums = np.tile(sum(x), (4, 1))  # every rank holds its own tokens for each of the 4
        testing.assert_close(scattered.call(scattered.arguments[0]), sums)
        exchanged = BY_NAME["lax.all_to_all"].start(CASES["dispatch"], problem)
        self.assertEqual(exchanged.arguments[0][0].shape, (4 * 4 * 7, 16))  # 27 rows in 4 parts
        per_peer = [np.resize(part, (4, 7, 16)) for part in x]
        expected = np.concatenate([part[peer] for peer in range(4) for part in per_peer])
        testing.assert_close(exchanged.call(exchanged.arguments[0]), expected, steps=0)


class FiguresTest(absltest.TestCase):
    def figures(self, **seconds):
        record = CASES["dispatch"].record() | {"remote_bytes": 1000}
        record["measurements"] = {name: {"seconds": s} for name, s in seconds.items()}
        BENCHMARK.add_figures({"cases": [record]})
        return record["measurements"]

    def test_ratios(self):
        measurements = self.figures(jax_ep=2e-6, ceiling=1e-6, other=5e-6)
        rates = [m["gigabytes_per_second"] for m in measurements.values()]
        np.testing.assert_allclose(rates, [0.5, 1, 0.2])
        np.testing.assert_allclose([m["of_ceiling"] for m in measurements.values()], [0.5, 1, 0.2])
        self.assertIsNone(self.figures(jax_ep=2e-6)["jax_ep"]["of_ceiling"])

    def test_required(self):
        for operation, names in (("dispatch", set(BY_NAME)), ("redispatch", {"jax_ep", "ceiling"})):
            required = BENCHMARK.required(CASES[operation].record())
            self.assertEqual({name for names in required for name in names}, names)


class CommandTest(absltest.TestCase):
    def test_smoke(self):
        with unittest.mock.patch.object(transfer, "CHAINED_OF_FEW", 3):  # compiles faster
            status, output, results = smoke("transfer", "--devices", "4")
        self.assertEqual(status, 0, output)
        self.assertEqual((results["num_devices"], results["counts"]), (4, False))
        self.assertLen(results["cases"], 3 * (2 + 2))  # two routings; few tokens singly, too
        self.assertEqual({record["chained"] for record in results["cases"]}, {1, 3, 8})
        for record in results["cases"]:
            measurements = record["measurements"]
            is_redispatch = record["operation"] == "redispatch"
            self.assertEqual(tuple(measurements), tuple(BY_NAME)[: 2 if is_redispatch else 6])
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

    def test_limits_of_sms_and_domains(self):
        """Variants of jax_ep; all are compared with the provider named "ceiling"."""
        ceiling = providers.Baseline("ceiling", providers.all_to_all)
        arguments = ("--devices", "2", "--operation", "dispatch", "--shape", "300,16,4,2")
        arguments += ("--num-sms", "2", "--num-sms", "3", "--require-all")
        arguments += ("--domain-size", "1")
        with unittest.mock.patch.object(type(BENCHMARK), "providers", (ceiling, Ours())):
            status, output, results = smoke("transfer", *arguments)
        self.assertEqual(status, 1)
        for record in results["cases"]:
            measurements = record["measurements"]
            names = ["ceiling", "jax_ep", "jax_ep 2 SMs", "jax_ep 3 SMs", "jax_ep domains of 1"]
            self.assertEqual(list(measurements), names)
            for measurement in measurements.values():
                ratio = measurements["ceiling"]["seconds"] / measurement["seconds"]
                self.assertAlmostEqual(measurement["of_ceiling"], ratio)
        self.assertNotIn("ceiling: it was not run", output)
        self.assertIn("lax.all_to_all: it was not run", output)

    def test_what_does_not_fit(self):
        for arguments, message in (
            (("--domain-size", "3"), "--domain-size 3 does not divide 8 devices"),
            (("--devices", "99"), "--devices 99 is more than the 8 devices"),
            (("--devices", "4", "--shape", "1,8,6,2"), "do not divide over 4 devices"),
            (
                ("--provider", "lax.all_to_all", "--operation", "redispatch"),
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
