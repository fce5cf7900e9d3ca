"""`python -m jax_ep.bench transfer`: its cases, where tokens go, and what lax.ragged_all_to_all is given."""

from __future__ import annotations

import argparse

import numpy as np
from absl.testing import absltest, parameterized
from programs import lower_for_cuda
from transfers import SHAPE, captured, problem_of

from jax_ep.bench import transfer_cases
from jax_ep.bench.ragged import ragged_operands
from jax_ep.bench.transfer_cases import Shape
from jax_ep.bench.transfer_contenders import RaggedAllToAll
from jax_ep.bench.transfer_problem import make_mesh, make_problem, sharded
from jax_ep.bench.transfer_routes import Routes, choose_experts

RANKS = (1, 2, 4)


class CasesTest(absltest.TestCase):
    def test_chosen(self):
        shapes = transfer_cases.choose_shapes(None, True, False)
        self.assertLen(shapes, 3 + 8)  # the first is one of the sweep
        self.assertEqual({s.tokens for s in shapes}, set(transfer_cases.SWEEP_TOKENS))
        cases = transfer_cases.choose_cases(shapes, None, ["combine"])
        self.assertLen(cases, 11 + 1 + 4)  # zipf for the first; 1 to 128 tokens singly, too
        self.assertEqual({c.shape.tokens for c in cases if c.chained == 64}, {1, 8, 32, 128})
        self.assertLen(transfer_cases.choose_cases(shapes[:2], ["zipf"], None), 2 * 3)

    def test_parsed(self):
        self.assertEqual(transfer_cases.parse_shape("1,2,4,3"), Shape(1, 2, 4, 3))
        wrong = {"1,2,3": "T,H,E,K", "a,b,c,d": "T,H,E,K", "1,8,2,3": "distinct"}
        for text, message in wrong.items():
            with self.assertRaisesRegex(argparse.ArgumentTypeError, message):
                transfer_cases.parse_shape(text)


class RoutesTest(parameterized.TestCase):
    @parameterized.product(ranks=RANKS, routing=transfer_cases.ROUTINGS)
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
                for choice, expert in enumerate(chosen):
                    rank = expert // local
                    counts[0, source, rank] += 1
                    pairs.add((source, token, rank))
                    received[rank].append((expert, source, token, choice))
        for source, _, rank in pairs:
            counts[1, source, rank] += source != rank
        np.testing.assert_array_equal(routes.counts, counts[0])
        self.assertEqual(routes.recv_capacity, max(map(len, received)))
        self.assertEqual(routes.busiest_pairs, max(counts[1].sum(0).max(), counts[1].sum(1).max()))
        for rank in range(ranks):
            expected = [(s * 9 + t) * 3 + k for _, s, t, k in sorted(received[rank])]
            self.assertEqual(routes.received(rank).tolist(), expected)
            by_expert = sorted((e, t) for t in range(9) for e in ids[rank, t])
            self.assertEqual(routes.sent_tokens()[rank].tolist(), [t for _, t in by_expert])

    def test_the_busiest_may_be_a_receiver(self):
        ids = np.array([[[2, 3], [2, 0]], [[4, 5], [0, 2]], [[2, 3], [3, 4]]], np.int32)
        # Rank 1 (experts 2, 3) gets 2 tokens of rank 0 and 2 of rank 2; nobody sends more than 2.
        self.assertEqual(Routes(ids, 6).busiest_pairs, 4)

    @parameterized.parameters(*transfer_cases.ROUTINGS)
    def test_drawn_without_replacement(self, routing):
        """How often an expert is among two choices: drawn first, or second after another."""
        ids = choose_experts(Shape(40000, 1, 5, 2), 1, routing)
        p = np.arange(1, 6) ** (-1.2 if routing == "zipf" else 0.0)
        p /= p.sum()
        expected = p + [sum(p[j] * p[i] / (1 - p[j]) for j in range(5) if j != i) for i in range(5)]
        measured = np.sort(np.bincount(ids.ravel()) / 40000)[::-1]
        np.testing.assert_allclose(measured, expected, atol=0.012)  # 5 standard deviations

    def test_operands(self):
        problem = make_problem(make_mesh(4), SHAPE, "balanced", 1000)  # 288 bytes of tokens a rank
        self.assertLen(problem.sets, 4)
        self.assertLen(make_problem(make_mesh(4), SHAPE, "balanced", 1e6).sets, 16)
        self.assertEqual([a.shape for a in problem.sets[0]], [(36, 16), (36, 3), (36, 3)])
        self.assertFalse(np.array_equal(problem.sets[0].x, problem.sets[1].x))
        self.assertEqual(problem.remote_bytes, problem.routes.busiest_pairs * 32)


def ragged_all_to_all(rows, outputs, input_offsets, send_sizes, output_offsets, recv_sizes):
    """What lax.ragged_all_to_all is documented to do, on lists of ranks; no row is written twice."""
    ranks, updates = len(rows), len(input_offsets[0]) // len(rows)
    written = [np.zeros(len(output), int) for output in outputs]
    for source in range(ranks):
        for i in range(ranks * updates):
            target, back = i // updates, source * updates + i % updates
            start, size, at = (a[source][i] for a in (input_offsets, send_sizes, output_offsets))
            assert size == recv_sizes[target][back] and start + size <= len(rows[source])
            outputs[target][at : at + size] = rows[source][start : start + size]
            written[target][at : at + size] += 1
    return written


class RaggedTest(parameterized.TestCase):
    @parameterized.product(ranks=RANKS, updates=(1, 64), tokens=(1, 9, 100))
    def test_every_row_arrives_once_and_comes_back(self, ranks, updates, tokens):
        shape = Shape(tokens, 16, 8, 3)
        routes = Routes(choose_experts(shape, ranks, "zipf"), 8)
        choices = np.arange(routes.topk_ids.size).reshape(ranks, -1)
        order = np.argsort(routes.topk_ids.reshape(ranks, -1), axis=1, kind="stable")
        sent = list(np.take_along_axis(choices, order, 1))
        there = [np.full(n, -1) for n in routes.counts.sum(0)]
        for written in ragged_all_to_all(sent, there, *ragged_operands(routes.counts, updates)):
            np.testing.assert_array_equal(written, 1)
        experts = routes.topk_ids.ravel()
        for rank, arrived in enumerate(there):
            self.assertEqual(sorted(arrived), sorted(routes.received(rank)))
            np.testing.assert_array_equal(experts[arrived] // (8 // ranks), rank)
        home = [np.full(tokens * 3, -1) for _ in range(ranks)]
        ragged_all_to_all(there, home, *ragged_operands(routes.counts.T, updates))
        np.testing.assert_array_equal(home, sent)
        sizes = ragged_operands(routes.counts, updates).send_sizes.reshape(ranks, ranks, updates)
        self.assertLessEqual((sizes.max(2) - sizes.min(2)).max(), 1)  # nearly equal pieces

    @parameterized.parameters(1, 64)
    def test_what_the_contender_sends(self, updates):
        """The program's own arguments, by the simulation; and it lowers for CUDA."""
        problem = problem_of()
        _, arguments, *_ = captured(RaggedAllToAll(updates), "dispatch", problem)
        rows, *operands = (np.split(np.asarray(a), 4) for a in arguments[0])
        outputs = [np.zeros((problem.routes.recv_capacity, 16), rows[0].dtype) for _ in range(4)]
        ragged_all_to_all(rows, outputs, *operands)
        x = np.asarray(problem.sets[0].x)
        for rank, output in enumerate(outputs):
            expected = x[problem.routes.received(rank) // SHAPE.choices].astype(np.float32)
            arrived = output[: len(expected)].astype(np.float32)
            self.assertCountEqual(arrived.tolist(), expected.tolist())
        for operation in ("dispatch", "combine"):
            transfer, arguments, mesh, *_ = captured(RaggedAllToAll(updates), operation, problem)
            program = lower_for_cuda(sharded(transfer, mesh), *arguments[0])
            self.assertEqual(program.text.count("call @ragged_all_to_all"), 1)


if __name__ == "__main__":
    absltest.main()
