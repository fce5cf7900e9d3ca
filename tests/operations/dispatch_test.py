"""dispatch against the numpy oracle: rows bit by bit, row weights, and every field of every rank's plan."""

from __future__ import annotations

import dataclasses
import functools

import testing  # isort: skip

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy_moe
from absl.testing import absltest, parameterized
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from testing import Sizes

import jax_ep

MOST = testing.NUM_DEVICES
ODD = testing.rank_counts(3)[-1]

SIZES = {
    "usual": Sizes(MOST, num_local=2, num_tokens=6, top_k=3),
    "one_rank": Sizes(1, num_local=4, num_tokens=9, top_k=2),
    "one_local_expert": Sizes(MOST, num_local=1, num_tokens=5, top_k=2),
    "one_of_each": Sizes(1, num_local=1, num_tokens=1, top_k=1, hidden=1),
    "one_choice": Sizes(testing.rank_counts(2)[-1], num_local=3, num_tokens=7, top_k=1),
    "odd_everything": Sizes(ODD, num_local=3, num_tokens=7, top_k=3, hidden=5),
    "five_ranks": Sizes(
        testing.rank_counts(1, 5)[-1], num_local=3, num_tokens=3, top_k=4, hidden=3
    ),
    "seven_ranks": Sizes(
        testing.rank_counts(1, 7)[-1], num_local=1, num_tokens=4, top_k=7, hidden=7
    ),
    "align_8": Sizes(ODD, num_local=2, num_tokens=6, top_k=2, row_align=8),
    "align_128": Sizes(
        testing.rank_counts(2)[-1], num_local=3, num_tokens=5, top_k=2, row_align=128
    ),
    "align_3_capacity_10": Sizes(ODD, num_local=2, top_k=2, row_align=3, recv_capacity=10),
    "capacity_1": Sizes(MOST, top_k=2, recv_capacity=1),
    "more_choices_than_experts": Sizes(1, num_local=2, num_tokens=4, top_k=5),
}


@functools.cache
def dispatcher(sizes: Sizes, **kwargs):
    """One compiled function for all routings and data of these sizes."""
    return testing.sharded(
        lambda x, ids, weights: sizes.dispatch(x, ids, weights, **kwargs), sizes.mesh
    )


def run(sizes: Sizes, x, ids, weights, **kwargs):
    """(rows[R,M,H], row_weights[R,M], group_sizes, plan as numpy)."""
    merged = testing.merge_ranks((x, ids, weights))
    sent = dispatcher(sizes, **kwargs)(*merged)
    rows, row_weights = testing.split_ranks((sent.rows, sent.row_weights), sizes.num_ranks)
    return rows, row_weights, np.asarray(sent.group_sizes), sent.plan


class RoutingTest(parameterized.TestCase):
    @parameterized.parameters(*SIZES)
    def test_every_kind_of_routing(self, name):
        sizes = SIZES[name]
        rng = np.random.default_rng(0)
        for kind, ids in testing.routings(sizes, seed=1).items():
            x = testing.random_values(rng, (*ids.shape[:2], sizes.hidden))
            weights = testing.random_values(rng, ids.shape)
            plans = sizes.plans(ids)
            rows, row_weights, group_sizes, plan = run(sizes, x, ids, weights)
            testing.assert_plan(plan, plans, kind)
            testing.assert_bitwise(group_sizes, plan.group_sizes, kind)
            expected_rows, expected_weights = numpy_moe.dispatch(x, weights, plans)
            testing.assert_bitwise(rows, expected_rows, kind)
            testing.assert_bitwise(row_weights, expected_weights, kind)

    def test_many_calls_with_changing_routes(self):
        sizes = Sizes(MOST, num_tokens=4, row_align=2, recv_capacity=10)
        rng = np.random.default_rng(2)
        x = testing.random_values(rng, (MOST, 4, 8))
        weights = testing.random_values(rng, sizes.ids_shape)
        for call in range(60):
            sparse = rng.random(sizes.ids_shape) < rng.random()
            ids = np.where(sparse, -1, rng.integers(-2, sizes.num_experts + 1, sizes.ids_shape))
            plans = sizes.plans(ids.astype(np.int32))
            rows, _, _, plan = run(sizes, x, ids.astype(np.int32), weights)
            testing.assert_plan(plan, plans, f"call {call}")
            testing.assert_bitwise(rows, numpy_moe.dispatch(x, None, plans)[0], f"call {call}")
        self.assertEqual(dispatcher(sizes)._cache_size(), 1)


class CapacityTest(parameterized.TestCase):
    @parameterized.product(
        routing=[("uniform", 1), ("skewed", 4), ("repeats", 3)], delta=[-1, 0, 1, "0.9"]
    )
    def test_around_the_demand(self, routing, delta):
        kind, row_align = routing
        sizes = Sizes(ODD, num_local=3, num_tokens=8, top_k=3, row_align=row_align)
        ids = testing.routings(sizes, seed=4)[kind]
        unlimited = numpy_moe.make_plans(
            ids, num_experts=sizes.num_experts, recv_capacity=10**4, row_align=row_align
        )
        demand = max(numpy_moe.num_rows(plan) for plan in unlimited)
        capacity = int(0.9 * demand) if delta == "0.9" else demand + delta
        plans, plan, x, rows = self.run_with_capacity(sizes, ids, capacity)
        testing.assert_plan(plan, plans)
        testing.assert_bitwise(rows, numpy_moe.dispatch(x, None, plans)[0])
        dropped = int(np.asarray(plan.num_dropped).sum())
        self.assertEqual(dropped > 0, delta in (-1, "0.9"))
        routed = int(((ids >= 0) & (ids < sizes.num_experts)).sum())
        self.assertEqual(int(np.asarray(plan.kept).sum()), routed - dropped)

    def run_with_capacity(self, sizes, ids, capacity):
        sizes = dataclasses.replace(sizes, recv_capacity=capacity)
        x = testing.random_values(np.random.default_rng(5), (*ids.shape[:2], sizes.hidden))
        rows, _, _, plan = run(sizes, x, ids, None)
        return sizes.plans(ids), plan, x, rows

    @parameterized.parameters((1, 1), (4, 1), (4, 8), (1, 128))
    def test_default_is_the_closed_form_and_drops_nothing(self, top_k, row_align):
        sizes = Sizes(MOST, num_local=2, num_tokens=3, top_k=top_k, row_align=row_align)
        rng = np.random.default_rng(6)
        ids = testing.distinct_ids(rng, sizes)
        on_last_rank = (MOST - 1) * 2 + np.argsort(rng.random((MOST, 3, 2)), -1)
        ids[..., : min(top_k, 2)] = on_last_rank[..., : min(top_k, 2)]  # the most it can get
        ids[..., 2:] = -1
        rows, _, _, plan = run(sizes, np.ones((MOST, 3, 8), np.float32), ids, None)
        most = MOST * 3 * min(top_k, 2) + 2 * (row_align - 1)
        self.assertEqual(rows.shape[1], -(-most // row_align) * row_align)
        self.assertEqual(int(np.asarray(plan.num_dropped).sum()), 0)


class CapacityFactorTest(parameterized.TestCase):
    """M is a multiple of the even share T*K, between 1024 rows and the dropless number."""

    @parameterized.parameters(
        (1024, 2, 1, 1.0, 2048),
        (1024, 2, 1, 1.25, 2560),
        (1024, 2, 1, 1.0001, 2049),  # rounded up
        (1024, 2, 128, 1.25, 2560 + 4 * 127 + 4),  # room for the padding of 4 experts
        (1024, 2, 1, 100.0, 4 * 1024 * 2),  # dropless
        (64, 2, 1, 1.0, 4 * 64 * 2),  # below 1024 rows nothing is cut: dropless
        (256, 2, 1, 1.0, 1024),
        (0, 2, 1, 1.0, 0),
    )
    def test_rows(self, num_tokens, top_k, row_align, factor, expected):
        mesh = AbstractMesh((4,), ("expert",), axis_types=(AxisType.Auto,))
        f = jax.shard_map(
            lambda x, ids: (
                jax_ep.dispatch(
                    x,
                    ids,
                    None,
                    num_experts=16,
                    axis_name="expert",
                    capacity_factor=factor,
                    row_align=row_align,
                ).rows
            ),
            mesh=mesh,
            in_specs=P("expert"),
            out_specs=P("expert"),
        )
        x = jax.ShapeDtypeStruct((4 * num_tokens, 8), jnp.float32)
        ids = jax.ShapeDtypeStruct((4 * num_tokens, top_k), jnp.int32)
        self.assertEqual(jax.eval_shape(f, x, ids).shape, (4 * expected, 8))


class ValuesTest(parameterized.TestCase):
    sizes = Sizes(MOST, num_tokens=5, top_k=2, hidden=8, row_align=2)

    @parameterized.parameters(*testing.ROW_DTYPES)
    def test_rows_are_bit_exact(self, dtype):
        """Any bit pattern arrives: NaN payloads, signed zeros, subnormals, infinities."""
        rng = np.random.default_rng(7)
        dtype = jnp.dtype(dtype)
        words = rng.integers(0, 256, (MOST, 5, 8 * dtype.itemsize)).astype(np.uint8)
        x = words.view(dtype)
        special = np.array([np.nan, -np.nan, -0.0, np.inf, -np.inf, 0.0], dtype)
        x[:, 0, :6] = special
        x[:, 1, 0] = np.array([1], f"u{dtype.itemsize}").view(dtype)  # the smallest subnormal
        ids = testing.routings(self.sizes, seed=8)["uniform"]
        rows, *_ = run(self.sizes, x, ids, None)
        testing.assert_bitwise(rows, numpy_moe.dispatch(x, None, self.sizes.plans(ids))[0])

    @parameterized.parameters(jnp.bfloat16, jnp.float16, jnp.float32)
    def test_weights_of_any_float_dtype_become_float32(self, dtype):
        ids = testing.routings(self.sizes, seed=9)["half"]
        weights = testing.random_values(np.random.default_rng(9), ids.shape, dtype)
        _, row_weights, _, _ = run(self.sizes, np.ones((MOST, 5, 8), np.float32), ids, weights)
        self.assertEqual(row_weights.dtype, np.float32)
        expected = numpy_moe.dispatch(
            np.ones((MOST, 5, 8), np.float32), weights, self.sizes.plans(ids)
        )
        testing.assert_bitwise(row_weights, expected[1])

    def test_float8_weights(self):
        ids = testing.routings(self.sizes, seed=9)["uniform"]
        weights = np.random.default_rng(9).random(ids.shape).astype(ml_dtypes.float8_e4m3fn)
        _, row_weights, _, _ = run(self.sizes, np.ones((MOST, 5, 8), np.float32), ids, weights)
        self.assertEqual(row_weights.dtype, np.float32)

    def test_without_weights(self):
        ids = testing.routings(self.sizes)["uniform"]
        _, row_weights, _, _ = run(self.sizes, np.ones((MOST, 5, 8), np.float32), ids, None)
        self.assertIsNone(row_weights)

    def test_same_bits_every_time(self):
        sizes = Sizes(MOST, num_tokens=16, top_k=2, recv_capacity=20)
        ids = testing.routings(sizes)["uniform"]
        x = testing.random_values(np.random.default_rng(1), (MOST, 16, 8))
        first = run(sizes, x, ids, None)
        for _ in range(5):
            again = run(sizes, x, ids, None)
            jax.tree.map(testing.assert_bitwise, again, first)

    def test_num_sms_does_not_change_the_result(self):
        ids = testing.routings(self.sizes)["uniform"]
        x = testing.random_values(np.random.default_rng(1), (MOST, 5, 8))
        testing.assert_bitwise(
            run(self.sizes, x, ids, None, num_sms=3)[0], run(self.sizes, x, ids, None)[0]
        )


class TailTest(parameterized.TestCase):
    @parameterized.parameters(True, False)
    def test_what_is_past_the_last_group(self, zero_tail):
        sizes = Sizes(MOST, num_tokens=4, top_k=2, row_align=4)
        rng = np.random.default_rng(10)
        x = testing.random_values(rng, (MOST, 4, 8))
        weights = testing.random_values(rng, sizes.ids_shape)
        for kind, ids in testing.routings(sizes).items():
            plans = sizes.plans(ids)
            rows, row_weights, _, plan = run(sizes, x, ids, weights, zero_tail=zero_tail)
            self.assertEqual(plan.zero_tail, zero_tail)
            on_gpu = jax.default_backend() != "cpu"
            expected = numpy_moe.dispatch(x, weights, plans, zero_tail=zero_tail or on_gpu)
            if on_gpu and not zero_tail:  # unspecified there
                numpy_moe.poison_tail(rows := rows.copy(), plans, 0)
                numpy_moe.poison_tail(row_weights := row_weights.copy(), plans, 0)
            testing.assert_bitwise_but_nan(rows, expected[0], kind)
            testing.assert_bitwise_but_nan(row_weights, expected[1], kind)

    def test_mask_tail(self):
        rows = jnp.full((6, 3), jnp.nan).at[:4].set(2.0)
        sizes = jnp.array([3, 1], jnp.int32)
        np.testing.assert_array_equal(jax_ep.mask_tail(rows, sizes)[:4], rows[:4])
        np.testing.assert_array_equal(jax_ep.mask_tail(rows, sizes)[4:], 0)
        np.testing.assert_array_equal(
            jax_ep.mask_tail(rows[:, 0], sizes)[4:], 0
        )  # row weights, too
        gradient = jax.grad(lambda r: (jax_ep.mask_tail(r, sizes) * jnp.array(np.nan)).sum())(rows)
        np.testing.assert_array_equal(np.isnan(gradient).any(1), [1, 1, 1, 1, 0, 0])
        np.testing.assert_array_equal(gradient[4:], 0)


class RedispatchTest(parameterized.TestCase):
    @parameterized.parameters(True, False)
    def test_other_tokens_along_the_same_routes(self, with_weights):
        sizes = Sizes(ODD, num_local=2, num_tokens=6, top_k=3, row_align=4, recv_capacity=24)
        rng = np.random.default_rng(11)

        @functools.partial(testing.sharded, mesh=sizes.mesh)
        def again(x, ids, other, weights):
            plan = sizes.dispatch(x, ids, None).plan
            return jax_ep.redispatch(other, plan, weights)

        for kind, ids in testing.routings(sizes).items():
            x, other = testing.random_values(rng, (2, ODD, 6, 8))
            weights = testing.random_values(rng, ids.shape) if with_weights else None
            plans = sizes.plans(ids)
            results = again(*testing.merge_ranks((x, ids, other, weights)))
            rows, row_weights = testing.split_ranks((results.rows, results.row_weights), ODD)
            expected = numpy_moe.dispatch(other, weights, plans)
            testing.assert_bitwise(rows, expected[0], kind)
            if with_weights:
                testing.assert_bitwise(row_weights, expected[1], kind)
            testing.assert_plan(results.plan, plans, kind)


if __name__ == "__main__":
    absltest.main()
