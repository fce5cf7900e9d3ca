"""combine against the numpy oracle, bit by bit: fma, rounding of each rank's sum, order of the ranks."""

from __future__ import annotations

import dataclasses
import functools

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
import numpy_moe
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P
from testing import Sizes

import jax_ep

MOST = testing.NUM_DEVICES
ODD = testing.rank_counts(1, 3)[-1]

SIZES = {
    "usual": Sizes(MOST, num_local=2, num_tokens=6, top_k=4),
    "one_rank_many_choices": Sizes(1, num_local=8, num_tokens=12, top_k=6),
    "odd_everything": Sizes(ODD, num_local=3, num_tokens=7, top_k=5, hidden=5, row_align=8),
    "dropping": Sizes(MOST, num_local=2, num_tokens=8, top_k=3, row_align=2, recv_capacity=24),
}


@functools.cache
def combiner(sizes: Sizes, zero_tail: bool = True, **kwargs):
    """(ids, y, row_weights) -> out, one compiled function for all data of these sizes."""

    def f(ids, y, row_weights):
        plan = sizes.dispatch(sizes.nothing(y.dtype), ids, None, zero_tail=zero_tail).plan
        return jax_ep.combine(y, plan, row_weights, **kwargs)

    return testing.sharded(f, sizes.mesh)


def run(sizes: Sizes, ids, y, row_weights, **kwargs):
    out = combiner(sizes, **kwargs)(*testing.merge_ranks((ids, y, row_weights)))
    return testing.split_ranks(out, sizes.num_ranks)


def expert_outputs(rng, plans, hidden, dtype, weights_dtype=np.float32):
    """y and row weights that are NaN wherever there is no token: combine must read neither there."""
    shape = len(plans), len(plans[0].row_source)
    y = np.full((*shape, hidden), np.nan, dtype)
    row_weights = np.full(shape, np.nan, weights_dtype)
    for rank, row, *_ in numpy_moe.real_rows(plans):
        y[rank, row] = testing.random_values(rng, hidden, dtype)
        row_weights[rank, row] = testing.random_values(rng, (), weights_dtype)
    return y, row_weights


class BitwiseTest(parameterized.TestCase):
    @parameterized.product(name=list(SIZES), dtype=testing.ROW_DTYPES)
    def test_every_kind_of_routing(self, name, dtype):
        sizes = SIZES[name]
        rng = np.random.default_rng(0)
        for kind, ids in testing.routings(sizes, seed=1).items():
            plans = sizes.plans(ids)
            y, row_weights = expert_outputs(rng, plans, sizes.hidden, dtype)
            got = run(sizes, ids, y, row_weights)
            testing.assert_bitwise(got, numpy_moe.combine(y, plans, row_weights), kind)

    @parameterized.product(dtype=testing.ROW_DTYPES, zero_tail=[True, False])
    def test_without_weights(self, dtype, zero_tail):
        sizes = SIZES["usual"]
        rng = np.random.default_rng(2)
        for kind, ids in testing.routings(sizes, seed=3).items():
            plans = sizes.plans(ids)
            y, _ = expert_outputs(rng, plans, sizes.hidden, dtype)
            got = run(sizes, ids, y, None, zero_tail=zero_tail)
            testing.assert_bitwise(got, numpy_moe.combine(y, plans, None), kind)

    def test_many_values(self):
        """Rare roundings need many sums: here 8192 of them, of up to six terms each."""
        sizes = Sizes(ODD, num_local=2, num_tokens=16, top_k=6, hidden=512 // ODD)
        rng = np.random.default_rng(4)
        ids = testing.routings(sizes, seed=5)["repeats"]
        plans = sizes.plans(ids)
        y, row_weights = expert_outputs(rng, plans, sizes.hidden, np.float32)
        got = run(sizes, ids, y, row_weights)
        testing.assert_bitwise(got, numpy_moe.combine(y, plans, row_weights))

    @parameterized.parameters(jnp.bfloat16, jnp.float16)
    def test_row_weights_of_other_float_dtypes(self, weights_dtype):
        sizes = SIZES["usual"]
        ids = testing.routings(sizes)["uniform"]
        plans = sizes.plans(ids)
        rng = np.random.default_rng(6)
        y, row_weights = expert_outputs(rng, plans, sizes.hidden, jnp.bfloat16, weights_dtype)
        got = run(sizes, ids, y, row_weights)
        expected = numpy_moe.combine(y, plans, row_weights.astype(np.float32))
        testing.assert_bitwise(got, expected)


class SpecialValuesTest(parameterized.TestCase):
    sizes = Sizes(MOST, num_local=2, num_tokens=6, top_k=2)

    def data(self, dtype=np.float32):
        ids = testing.routings(self.sizes)["uniform"]
        plans = self.sizes.plans(ids)
        rng = np.random.default_rng(0)
        return ids, plans, *expert_outputs(rng, plans, self.sizes.hidden, dtype)

    @parameterized.parameters(np.inf, -np.inf, np.nan)
    def test_one_bad_row_touches_one_token(self, bad):
        ids, plans, y, row_weights = self.data()
        clean = run(self.sizes, ids, y, row_weights)
        rank, row, source, token, _ = next(numpy_moe.real_rows(plans))
        y[rank, row, 3] = bad
        got = run(self.sizes, ids, y, row_weights).copy()
        self.assertFalse(np.isfinite(got[source, token, 3]))
        got[source, token, 3] = clean[source, token, 3]
        testing.assert_bitwise(got, clean)

    @parameterized.parameters(*testing.ROW_DTYPES)
    def test_a_sum_is_never_minus_zero(self, dtype):
        ids, _plans, y, row_weights = self.data(dtype)
        y[~np.isnan(y)] = -0.0
        ids[0, 0] = -1
        got = run(self.sizes, ids, y, row_weights)
        testing.assert_bitwise(got, np.zeros_like(got))

    def test_overflow_of_a_rank_is_infinite(self):
        ids, plans, y, row_weights = self.data(np.float16)
        y[~np.isnan(y)] = 60000
        row_weights[~np.isnan(row_weights)] = 1.5
        got = run(self.sizes, ids, y, row_weights)
        testing.assert_bitwise(got, numpy_moe.combine(y, plans, row_weights))
        self.assertTrue(np.isinf(got).any())

    def test_products_beyond_float32_are_infinite_only_after_the_addition(self):
        """fma(w, y, acc): the product is not rounded, so huge terms of opposite sign may cancel."""
        sizes = Sizes(1, num_local=1, num_tokens=1, top_k=2, hidden=1, recv_capacity=2)
        ids = np.zeros((1, 1, 2), np.int32)
        y = np.float32([[[-(2.0**127)], [2.0**127]]]).repeat(sizes.hidden, 2)
        row_weights = np.float32([[1, 2]])
        got = run(sizes, ids, y, row_weights)
        testing.assert_bitwise(got, np.full_like(got, 2.0**127))


class DeterminismTest(parameterized.TestCase):
    def test_same_bits_every_time_and_for_any_num_sms(self):
        sizes = SIZES["usual"]
        ids = testing.routings(sizes)["uniform"]
        y, row_weights = expert_outputs(np.random.default_rng(0), sizes.plans(ids), 8, np.float32)
        first = run(sizes, ids, y, row_weights)
        for num_sms in None, None, None, 1, 7:
            testing.assert_bitwise(run(sizes, ids, y, row_weights, num_sms=num_sms), first)


class PlanFromElsewhereTest(parameterized.TestCase):
    """A plan is data: what it says is checked, never trusted."""

    sizes = Sizes(MOST, num_local=2, num_tokens=6, top_k=2)

    @functools.cached_property
    def functions(self):
        """(ids -> plan, combine), compiled once."""
        make = lambda ids: self.sizes.dispatch(self.sizes.nothing(), ids, None).plan
        return testing.sharded(make, self.sizes.mesh), testing.sharded(
            jax_ep.combine, self.sizes.mesh
        )

    def run_with_plan(self, change):
        ids = testing.routings(self.sizes)["uniform"]
        plans = self.sizes.plans(ids)
        y, row_weights = expert_outputs(np.random.default_rng(0), plans, 8, np.float32)
        make, use = self.functions
        plan = make(testing.merge_ranks(ids))
        y, row_weights = testing.merge_ranks((y, row_weights))
        got = use(y, change(plan), row_weights)
        return testing.split_ranks((use(y, plan, row_weights), got), MOST), plans

    def test_a_row_source_out_of_range_is_no_row(self):
        row = 0  # a real row of rank 0
        for column, value in (
            (0, 10**6),
            (0, -7),
            (1, 6),
            (1, 2**31 - 1),
            (1, -(2**31)),
            (2, 2),
            (2, -1),
        ):
            with self.subTest(column=column, value=value):
                (clean, got), plans = self.run_with_plan(
                    lambda plan, at=(row, column), value=value: dataclasses.replace(
                        plan, row_source=plan.row_source.at[at].set(value)
                    )
                )
                source, token, _ = plans[0].row_source[row]
                others = np.ones((MOST, 6), bool)
                others[source, token] = False
                # The token itself may add what its slot held: its row's rank knows no slot.
                testing.assert_bitwise(got[others], clean[others])

    def test_a_failed_exchange_gives_nan(self):
        (_, got), _ = self.run_with_plan(
            lambda plan: dataclasses.replace(plan, status=plan.status + 1)
        )
        self.assertTrue(np.isnan(got).all())

    def test_a_failed_exchange_gives_nan_rows(self):
        ids = testing.routings(self.sizes)["uniform"]

        def f(ids, x, weights):
            plan = self.sizes.dispatch(x, ids, None).plan
            plan = dataclasses.replace(plan, status=plan.status + 1)
            sent = jax_ep.redispatch(x, plan, weights)
            return sent.rows, sent.row_weights

        f = jax.shard_map(f, mesh=self.sizes.mesh, in_specs=P("expert"), out_specs=P("expert"))
        x = np.ones((MOST, 6, 8), np.float32)
        weights = np.ones(ids.shape, np.float32)
        for values in jax.jit(f)(*testing.merge_ranks((ids, x, weights))):
            self.assertTrue(np.isnan(values).all())


if __name__ == "__main__":
    absltest.main()
