"""The oracle against dense algebra: matrices, brute force and exact fractions instead of loops over rows."""

import fractions
import itertools
import math
import sys

import ml_dtypes
import numpy as np
import numpy_moe
from absl.testing import absltest, parameterized


def random_ids(rng, num_ranks, num_tokens, top_k, num_experts, low=-2):
    """Ids with some -1, some bad ones and some repeats."""
    return rng.integers(low, num_experts + 1, (num_ranks, num_tokens, top_k)).astype(np.int32)


def selection(plans, num_tokens, top_k):
    """The plan as a matrix S[R*M, R*T*K] of zeros and ones: rows = S @ (token of every k)."""
    num_rows = len(plans[0].row_source)
    matrix = np.zeros((len(plans) * num_rows, len(plans) * num_tokens * top_k))
    for rank, row, source, token, k in numpy_moe.real_rows(plans):
        matrix[rank * num_rows + row, (source * num_tokens + token) * top_k + k] = 1
    return matrix


class FmaTest(parameterized.TestCase):
    def nearest_float32(self, exact):
        """The float32 nearest to a fraction, ties to even, by comparing neighbors exactly."""
        guess = np.float32(float(exact))
        around = [
            np.nextafter(guess, np.float32(-np.inf)),
            guess,
            np.nextafter(guess, np.float32(np.inf)),
        ]
        key = lambda v: (abs(fractions.Fraction(float(v)) - exact), int(v.view(np.int32)) & 1)
        return min(around, key=key)

    @parameterized.parameters("random", "canceling", "tie")
    def test_has_one_rounding(self, kind):
        rng = np.random.default_rng(0)
        a, b = rng.standard_normal((2, 2000)).astype(np.float32)
        if kind == "random":
            c = (rng.standard_normal(2000) * 10.0 ** rng.integers(-9, 9, 2000)).astype(np.float32)
        elif kind == "canceling":
            c = -(a * b)
        else:  # c is half a unit in the last place of the product, or nearly
            a = (1 + rng.integers(0, 2**12, 2000) / 2**12).astype(np.float32)
            b = np.ones(2000, np.float32)
            c = (2.0**-24 * rng.choice([1, -1, 1 + 2**-20, 1 - 2**-20], 2000)).astype(np.float32)
        got = numpy_moe.fma(a, b, c)
        for i in range(2000):
            exact = fractions.Fraction(float(a[i])) * fractions.Fraction(
                float(b[i])
            ) + fractions.Fraction(float(c[i]))
            self.assertEqual(got[i], self.nearest_float32(exact))

    def test_double_rounding_would_differ(self):
        # In float64, 1 + 2^-24 + 2^-80 rounds onto a tie of float32, which then loses the last bit.
        a, b, c = np.float32(2.0**-40), np.float32(2.0**-40), np.float32(1)
        a2, b2 = np.float32(1 + 2.0**-12), np.float32(1 + 2.0**-12)  # product: 1 + 2^-11 + 2^-24
        self.assertEqual(numpy_moe.fma(a, b, c), c)
        self.assertEqual(
            numpy_moe.fma(a2, b2, np.float32(2.0**-80)), np.float32(1 + 2.0**-11 + 2.0**-23)
        )
        self.assertEqual(np.float32(np.float64(a2) * b2 + 2.0**-80), np.float32(1 + 2.0**-11))

    def test_special_values(self):
        inf = np.float32(np.inf)
        self.assertEqual(numpy_moe.fma(inf, np.float32(1), np.float32(1)), inf)
        self.assertTrue(np.isnan(numpy_moe.fma(inf, np.float32(0), np.float32(1))))
        self.assertFalse(np.signbit(numpy_moe.fma(np.float32(-0.0), np.float32(1), np.float32(0))))

    def test_agrees_with_the_standard_library(self):
        if sys.version_info < (3, 13):
            return  # math.fma is new in 3.13
        for a, b, c in np.random.default_rng(1).standard_normal((100, 3)).astype(np.float32):
            exact = math.fma(float(a), float(b), float(c))  # float64: enough where no tie is near
            self.assertLessEqual(abs(float(numpy_moe.fma(a, b, c)) - exact), abs(exact) * 2.0**-24)


class PlanTest(parameterized.TestCase):
    @parameterized.product(num_ranks=[1, 2, 3], row_align=[1, 4], fraction=[None, 0.9, 0.5, 0.0])
    def test_capacity_and_quota_are_the_largest(self, num_ranks, row_align, fraction):
        rng = np.random.default_rng(num_ranks * 10 + row_align)
        num_local, num_tokens, top_k = 3, 7, 3
        num_experts = num_local * num_ranks
        ids = random_ids(rng, num_ranks, num_tokens, top_k, num_experts)
        counts = np.stack(
            [[(ids[s] == e).sum() for s in range(num_ranks)] for e in range(num_experts)]
        )
        capacity = None if fraction is None else int(fraction * counts.sum() / num_ranks)
        plans = numpy_moe.make_plans(
            ids, num_experts=num_experts, recv_capacity=capacity, row_align=row_align
        )
        for rank, plan in enumerate(plans):
            here = counts[rank * num_local : (rank + 1) * num_local]
            sizes, most = here.sum(1), ids.size + 1
            room = len(plan.row_source)
            fits = [
                c
                for c in range(most)
                if (-(-np.minimum(sizes, c) // row_align) * row_align).sum() <= room
            ]
            capped = np.minimum(sizes, max(fits))
            for expert in range(num_local):
                quota = max(
                    q for q in range(most) if np.minimum(here[expert], q).sum() <= capped[expert]
                )
                of_rank = plan.row_source[plan.row_offsets[expert] :][
                    : plan.real_group_sizes[expert], 0
                ]
                np.testing.assert_array_equal(
                    np.bincount(of_rank, minlength=num_ranks), np.minimum(here[expert], quota)
                )
            np.testing.assert_array_equal(plan.num_received, [sizes.sum()])
            np.testing.assert_array_equal(
                plan.num_dropped, [sizes.sum() - plan.real_group_sizes.sum()]
            )
            if fraction is None and top_k <= num_local:
                self.assertEqual(plan.num_dropped[0], 0)

    def test_bad_ids_are_counted_where_they_are(self):
        ids = np.array([[[0, 5]], [[-1, -7]], [[2**31 - 1, 4]]], np.int32)
        plans = numpy_moe.make_plans(ids, num_experts=3)
        self.assertEqual([int(plan.num_bad_ids[0]) for plan in plans], [1, 1, 2])
        self.assertEqual(sum(int(plan.kept.sum()) for plan in plans), 1)

    @parameterized.parameters(1, 4)
    def test_rows_are_in_order_and_kept_choices_are_the_first(self, row_align):
        rng = np.random.default_rng(3)
        ids = random_ids(rng, 3, 6, 2, 6)
        plans = numpy_moe.make_plans(ids, num_experts=6, recv_capacity=12, row_align=row_align)
        for rank, plan in enumerate(plans):
            self.assertTrue((plan.group_sizes % row_align == 0).all())
            for expert, rows in enumerate(numpy_moe.group_slices(plan.group_sizes, 12)):
                group = plan.row_source[rows]
                real = group[: plan.real_group_sizes[expert]]
                self.assertTrue((group[len(real) :] == -1).all())
                self.assertEqual(real.tolist(), sorted(real.tolist()))
                self.assertTrue((ids[tuple(real.T)] == rank * 2 + expert).all())
            np.testing.assert_array_equal(plan.destination, np.where(plan.kept, ids[rank] // 2, -1))
        for source, expert in itertools.product(range(3), range(6)):
            kept = plans[source].kept.ravel()[(ids[source] == expert).ravel()]
            self.assertEqual(kept.tolist(), sorted(kept.tolist(), reverse=True))

    @parameterized.parameters(None, 5)
    def test_slots_of_a_token_count_the_ranks_that_have_its_rows(self, recv_capacity):
        ids = random_ids(np.random.default_rng(7), 4, 5, 3, 8)
        plans = numpy_moe.make_plans(ids, num_experts=8, recv_capacity=recv_capacity)
        ranks_of = {}  # (source, token) -> {rank: slot}
        for rank, row, source, token, _ in numpy_moe.real_rows(plans):
            slot = int(plans[rank].partial_sum_index[row])
            self.assertEqual(ranks_of.setdefault((source, token), {}).setdefault(rank, slot), slot)
        for slots in ranks_of.values():
            self.assertEqual([slots[rank] for rank in sorted(slots)], list(range(len(slots))))
        for plan in plans:
            np.testing.assert_array_equal(plan.partial_sum_index < 0, plan.row_source[:, 0] < 0)


class AlgebraTest(parameterized.TestCase):
    """Small integers: every sum is exact, so that matrices give the very same numbers."""

    def setUp(self):
        super().setUp()
        rng = self.rng = np.random.default_rng(4)
        self.ids = random_ids(rng, 3, 5, 3, 6)
        self.plans = numpy_moe.make_plans(self.ids, num_experts=6, recv_capacity=10, row_align=2)
        self.matrix = selection(self.plans, 5, 3)
        self.x = rng.integers(-8, 8, (3, 5, 4)).astype(np.float32)
        self.weights = rng.integers(-3, 4, (3, 5, 3)).astype(np.float32)
        self.y = rng.integers(-8, 8, (3, 10, 4)).astype(np.float32)

    def test_dispatch_is_a_selection(self):
        rows, row_weights = numpy_moe.dispatch(self.x, self.weights, self.plans)
        repeated = np.repeat(self.x.reshape(15, 4), 3, axis=0)
        np.testing.assert_array_equal(rows.reshape(-1, 4), self.matrix @ repeated)
        np.testing.assert_array_equal(row_weights.ravel(), self.matrix @ self.weights.ravel())

    @parameterized.parameters(np.float32, ml_dtypes.bfloat16, np.float16)
    def test_combine_is_the_transpose(self, dtype):
        rows = (self.matrix @ self.weights.ravel()).astype(np.float32).reshape(3, 10)
        got = numpy_moe.combine(self.y.astype(dtype), self.plans, rows)
        expected = (
            (self.matrix.T @ (rows.reshape(-1, 1) * self.y.reshape(-1, 4)))
            .reshape(3, 5, 3, 4)
            .sum(2)
        )
        self.assertEqual(got.dtype, dtype)
        np.testing.assert_array_equal(
            got.astype(np.float32), expected.astype(dtype).astype(np.float32)
        )

    def test_gradients_are_adjoints(self):
        rows, row_weights = numpy_moe.dispatch(self.x, self.weights, self.plans)
        rows_gradient = self.rng.integers(-8, 8, rows.shape).astype(np.float32)
        weights_gradient = self.rng.integers(-8, 8, row_weights.shape).astype(np.float32)
        x_gradient, topk_gradient = numpy_moe.dispatch_gradient(
            rows_gradient, weights_gradient, self.plans
        )
        self.assertEqual((rows * rows_gradient).sum(), (self.x * x_gradient).sum())
        self.assertEqual(
            (row_weights * weights_gradient).sum(), (self.weights * topk_gradient).sum()
        )

        out_gradient = self.rng.integers(-8, 8, self.x.shape).astype(np.float32)
        out = numpy_moe.combine(self.y, self.plans, row_weights)
        y_gradient, row_gradient = numpy_moe.combine_gradient(
            out_gradient, self.y, self.plans, row_weights
        )
        value = (out * out_gradient).sum()  # linear in y and in the weights
        self.assertEqual((self.y * y_gradient).sum(), value)
        self.assertEqual((row_weights * row_gradient).sum(), value)

    def test_grouped_matmul_is_block_diagonal_algebra(self):
        sizes = np.array([3, 0, 5, 1])
        lhs, rhs = self.rng.standard_normal((12, 4)), self.rng.standard_normal((4, 4, 3))
        mask = np.repeat(np.eye(5)[:4], sizes, axis=0)
        mask = np.concatenate([mask, np.zeros((3, 5))])[:, :4]
        out = np.einsum("me,mk,ekn->mn", mask, lhs, rhs)
        got = numpy_moe.grouped_matmul(lhs, rhs, sizes)
        np.testing.assert_allclose(got, out, atol=1e-12)
        swapped = numpy_moe.grouped_matmul(lhs, rhs.swapaxes(1, 2), sizes, transpose_rhs=True)
        np.testing.assert_array_equal(swapped, got)
        gradient = self.rng.standard_normal((12, 3))
        for transpose in False, True:
            matrices = rhs.swapaxes(1, 2) if transpose else rhs
            got = numpy_moe.grouped_matmul_gradient(
                lhs, matrices, sizes, gradient, transpose_rhs=transpose
            )
            np.testing.assert_allclose(
                got[0], np.einsum("me,mn,ekn->mk", mask, gradient, rhs), atol=1e-12
            )
            of_rhs = np.einsum("me,mk,mn->ekn", mask, lhs, gradient)
            np.testing.assert_allclose(
                got[1], of_rhs.swapaxes(1, 2) if transpose else of_rhs, atol=1e-12
            )

    def test_strange_group_sizes(self):
        slices = list(numpy_moe.group_slices([2, -5, 3, 100, 4], 8))
        self.assertEqual(
            [(s.start, s.stop) for s in slices], [(0, 2), (2, 2), (2, 5), (5, 8), (8, 8)]
        )

    def test_the_three_together_are_the_dense_layer(self):
        matrices = self.rng.integers(-2, 3, (6, 4, 4)).astype(np.float32)
        rows, row_weights = numpy_moe.dispatch(self.x, self.weights, self.plans)
        y = np.stack(
            [
                numpy_moe.grouped_matmul(
                    rows[rank], matrices[rank * 2 : rank * 2 + 2], plan.group_sizes
                )
                for rank, plan in enumerate(self.plans)
            ]
        )
        got = numpy_moe.combine(y.astype(np.float32), self.plans, row_weights)
        kept = np.stack([plan.kept for plan in self.plans])
        self.assertFalse(kept[(self.ids >= 0) & (self.ids < 6)].all())  # some choices were dropped
        dense = numpy_moe.dense_moe(
            self.x,
            self.ids,
            self.weights,
            lambda e, token: token @ matrices[e],
            num_experts=6,
            kept=kept,
        )
        np.testing.assert_array_equal(got, dense)


if __name__ == "__main__":
    absltest.main()
