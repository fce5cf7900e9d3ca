"""Properties for routes, capacities and group sizes that hypothesis looks for. Compiled functions are reused."""

from __future__ import annotations

import functools

import testing  # isort: skip

import hypothesis
import hypothesis.extra.numpy
import jax
import numpy as np
import numpy_moe
from absl.testing import absltest
from hypothesis import strategies as st
from testing import Sizes

import jax_ep
from jax_ep._src.transfer import reference_plan

SIZES = Sizes(
    testing.NUM_DEVICES, num_local=2, num_tokens=3, top_k=3, hidden=4, row_align=2, recv_capacity=12
)
settings = functools.partial(hypothesis.settings, deadline=None, derandomize=True, database=None)

ids_strategy = hypothesis.extra.numpy.arrays(
    np.int32,
    SIZES.ids_shape,
    elements=st.one_of(
        st.integers(-1, SIZES.num_experts - 1),  # mostly good ones
        st.sampled_from([-1, -1, 0, 0, 1]),
        st.integers(-(2**31), 2**31 - 1),
    ),
    fill=st.just(-1),
)
small_integers = functools.partial(
    hypothesis.extra.numpy.arrays, np.float32, elements=st.integers(-8, 8).map(float)
)
X_SHAPE = (SIZES.num_ranks, SIZES.num_tokens, SIZES.hidden)


@functools.cache
def dispatch_and_combine():
    """(ids, x, weights) -> plan, rows, row_weights, combine of the rows with the weights, and without."""

    def f(ids, x, weights):
        sent = SIZES.dispatch(x, ids, weights)
        weighted = jax_ep.combine(sent.rows, sent.plan, sent.row_weights)
        plain = jax_ep.combine(sent.rows, sent.plan, None)
        return sent.plan, sent.rows, sent.row_weights, weighted, plain

    return testing.sharded(f, SIZES.mesh)


class RoutesTest(absltest.TestCase):
    @settings(max_examples=60)
    @hypothesis.given(
        ids=ids_strategy, x=small_integers(X_SHAPE), weights=small_integers(SIZES.ids_shape)
    )
    def test_any_routes(self, ids, x, weights):
        """Small integers: every sum is exact, so combine after dispatch is a product with a sum of weights."""
        plan, rows, row_weights, weighted, plain = dispatch_and_combine()(
            *testing.merge_ranks((ids, x, weights))
        )
        plans = SIZES.plans(ids)
        testing.assert_plan(plan, plans)
        expected = numpy_moe.dispatch(x, weights, plans)
        testing.assert_bitwise(testing.split_ranks(rows, SIZES.num_ranks), expected[0])
        testing.assert_bitwise(testing.split_ranks(row_weights, SIZES.num_ranks), expected[1])
        kept = np.stack([plan.kept for plan in plans])
        for out, factor in (weighted, weights * kept), (plain, kept):
            out = testing.split_ranks(out, SIZES.num_ranks)
            np.testing.assert_array_equal(out, factor.sum(-1, keepdims=True) * x)

    @settings(max_examples=40)
    @hypothesis.given(ids=ids_strategy)
    def test_every_choice_is_counted_once(self, ids):
        x = np.zeros(X_SHAPE, np.float32)
        plan, *_ = dispatch_and_combine()(
            *testing.merge_ranks((ids, x, np.zeros(ids.shape, np.float32)))
        )
        plan = testing.plan_arrays(plan)
        good, bad = (ids >= 0) & (ids < SIZES.num_experts), (ids < -1) | (ids >= SIZES.num_experts)
        self.assertEqual(plan["num_received"].sum(), good.sum())
        self.assertEqual(plan["num_dropped"].sum(), good.sum() - plan["kept"].sum())
        self.assertEqual(plan["real_group_sizes"].sum(), plan["kept"].sum())
        self.assertEqual((plan["row_source"][:, 0] >= 0).sum(), plan["kept"].sum())
        destination = np.where(plan["kept"], testing.merge_ranks(ids) // SIZES.num_local, -1)
        np.testing.assert_array_equal(plan["destination"], destination)
        np.testing.assert_array_equal(plan["num_bad_ids"], bad.reshape(SIZES.num_ranks, -1).sum(1))
        self.assertFalse((plan["kept"] & ~testing.merge_ranks(good)).any())


kept_counts = jax.jit(reference_plan.kept_counts)


class CapacityTest(absltest.TestCase):
    @settings(max_examples=150)
    @hypothesis.given(
        counts=hypothesis.extra.numpy.arrays(np.int32, (3, 3, 2), elements=st.integers(0, 20)),
        num_rows=st.integers(0, 150),
        row_align=st.integers(1, 16),
    )
    def test_cap_and_quota(self, counts, num_rows, row_align):
        got = np.asarray(kept_counts(counts, num_rows, row_align))
        for destination in range(3):
            by_expert = counts[:, destination].T.tolist()
            cap = numpy_moe.capacity_cap([sum(c) for c in by_expert], num_rows, row_align)
            for expert, by_source in enumerate(by_expert):
                quota = numpy_moe.source_quota(by_source, cap)
                np.testing.assert_array_equal(
                    got[:, destination, expert], np.minimum(by_source, quota)
                )


grouped_matmul = jax.jit(jax_ep.grouped_matmul)
rhs_gradient = jax.jit(
    lambda lhs, rhs, sizes, bar: jax.vjp(lambda rhs: jax_ep.grouped_matmul(lhs, rhs, sizes), rhs)[
        1
    ](bar)[0]
)


class GroupSizesTest(absltest.TestCase):
    @settings(max_examples=100)
    @hypothesis.given(
        sizes=hypothesis.extra.numpy.arrays(
            np.int32, 5, elements=st.one_of(st.integers(0, 12), st.integers(-(2**31), 2**31 - 1))
        ),
        lhs=small_integers((40, 3)),
        rhs=small_integers((5, 3, 4)),
        bar=small_integers((40, 4)),
    )
    def test_any_group_sizes(self, sizes, lhs, rhs, bar):
        end = [s.stop for s in numpy_moe.group_slices(sizes, 40)][-1]
        lhs, bar = lhs.copy(), bar.copy()
        lhs[end:] = bar[end:] = np.nan
        out = grouped_matmul(lhs, rhs, sizes)
        clean_lhs, clean_bar = np.nan_to_num(lhs), np.nan_to_num(bar)
        np.testing.assert_array_equal(out, numpy_moe.grouped_matmul(clean_lhs, rhs, sizes))
        _, expected = numpy_moe.grouped_matmul_gradient(clean_lhs, rhs, sizes, clean_bar)
        np.testing.assert_array_equal(rhs_gradient(lhs, rhs, sizes, bar), expected)


if __name__ == "__main__":
    absltest.main()
