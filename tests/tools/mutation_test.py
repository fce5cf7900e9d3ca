"""Broken implementations must be noticed: each test breaks one point of the contract and expects a comparison to fail."""

from __future__ import annotations

import contextlib
import dataclasses
import unittest.mock

import testing  # isort: skip

import grouped
import jax
import jax.numpy as jnp
import numpy as np
import numpy_moe
from absl.testing import absltest, parameterized
from jax import lax
from testing import Sizes

import jax_ep
from jax_ep._src.matmul import reference as reference_matmul
from jax_ep._src.matmul.grouped_matmul_activation import bind_activation
from jax_ep._src.matmul.params import GroupedMatmulActivationParams
from jax_ep._src.transfer import reference, reference_plan

SIZES = Sizes(
    testing.NUM_DEVICES, num_local=2, num_tokens=12, top_k=4, row_align=4, recv_capacity=48
)
# One rank holds all of a token's experts, so that the order and rounding within a rank show on any number of devices.
ONE_RANK = Sizes(1, num_local=4, num_tokens=32, top_k=4, row_align=4, recv_capacity=132)

DOMAINS = dataclasses.replace(SIZES, domain_size=max(1, testing.NUM_DEVICES // 2))

positions, kept_counts = reference_plan._positions, reference_plan.kept_counts
partial_sum_index, token_ranks = reference_plan._partial_sum_index, reference_plan._token_ranks
gather_rows, sum_over_ranks = reference._gather_rows, reference._sum_over_ranks
is_real, matmul = reference._is_real, reference_matmul._matmul
reference_activate = reference_matmul.activate


def swap_two_rows(values, index, plan, params):
    rows = gather_rows(values, index, plan, params)
    return rows.at[jnp.array([0, 1])].set(rows[jnp.array([1, 0])])


def drop_a_row(values, index, plan, params):
    return gather_rows(values, index, plan, params).at[0].set(0)


def flush_small_values(values, index, plan, params):
    rows = gather_rows(values, index, plan, params)
    return jnp.where(jnp.abs(rows) < 2.0**-126, jnp.zeros_like(rows), rows)


def fill_the_padding(values, index, plan, params):
    is_padding = (plan.row_source[:, 0] < 0).reshape(-1, *(1,) * (values.ndim - 1))
    return gather_rows(values, index, plan, params) + is_padding.astype(values.dtype)


def later_assignments_first(expert, num_experts):
    position, counts = positions(expert[::-1], num_experts)
    return position[::-1], counts


def quota_one_too_small(counts, num_rows, row_align):
    kept = kept_counts(counts, num_rows, row_align)
    return jnp.where((kept < counts) & (kept > 0), kept - 1, kept)


def quota_one_too_large(counts, num_rows, row_align):
    return jnp.minimum(kept_counts(counts, num_rows, row_align) + 1, counts)


def capacity_without_alignment(counts, num_rows, row_align):
    return kept_counts(counts, num_rows, 1)


def first_come_first_served(counts, num_rows, row_align):
    """Sources are served in rank order, instead of by the same quota."""
    kept = kept_counts(counts, num_rows, row_align)
    before = jnp.cumsum(counts, 0) - counts
    return jnp.clip(kept.sum(0, keepdims=True) - before, 0, counts)


def count_every_rank(is_sent, first_rank, rank):
    return is_sent.sum(1)


def count_this_rank(is_sent, first_rank, rank):
    return partial_sum_index(is_sent, first_rank, rank + 1)


def count_other_domains(is_sent, first_rank, rank):
    return partial_sum_index(is_sent, 0, rank)


def forward_to_the_next_rank(is_sent, size, rank):
    return token_ranks(is_sent, size, rank) << 1


def forward_for_another_rail(is_sent, size, rank):
    return token_ranks(jnp.roll(is_sent, 1, 0), size, rank)


def add_in_one_level(values, axis, domain_size):
    return sum_over_ranks(values, axis, None)


def add_in_domains_of_another_size(values, axis, domain_size):
    return sum_over_ranks(values, axis, 2 if domain_size == 4 else 1)


def add_in_another_order(values, axis, domain_size):
    arrived = lax.all_to_all(values, axis.name, 0, 0)
    total = jnp.zeros(values.shape[1:], jnp.float32)
    for rank in reversed(range(axis.size)):
        total = total + arrived[rank].astype(jnp.float32)
    return total


def add_in_the_dtype_of_rows(values, axis, domain_size):
    arrived = lax.all_to_all(values, axis.name, 0, 0)
    total = jnp.zeros(values.shape[1:], values.dtype)
    for rank in range(axis.size):
        total = total + arrived[rank]
    return total


def multiply_then_add(a, b, c):
    return lax.optimization_barrier(a * b) + c


def read_the_padding(plan, num_ranks):
    return jnp.ones_like(is_real(plan, num_ranks))


ROWS = [swap_two_rows, drop_a_row, flush_small_values, fill_the_padding]
PLAN = {
    "_positions": [later_assignments_first],
    "kept_counts": [
        quota_one_too_small, quota_one_too_large, capacity_without_alignment, first_come_first_served
    ],
    "_partial_sum_index": [count_every_rank, count_this_rank, count_other_domains],
    "_round_up": [lambda value, multiple: value],
    "_token_ranks": [forward_to_the_next_rank, forward_for_another_rail],
}  # fmt: skip
COMBINE = [
    ("_fused_multiply_add", multiply_then_add, np.float32, ONE_RANK),
    ("_fused_multiply_add", lambda a, b, c: a * b, np.float32, ONE_RANK),
    ("_sum_over_ranks", add_in_another_order, np.float32, SIZES),
    ("_sum_over_ranks", add_in_the_dtype_of_rows, jnp.bfloat16, SIZES),
    ("_sum_over_ranks", add_in_one_level, jnp.bfloat16, DOMAINS),
    ("_sum_over_ranks", add_in_domains_of_another_size, jnp.bfloat16, DOMAINS),
    ("_is_real", read_the_padding, np.float32, SIZES),
]

MATMUL = {
    "_rows_at": lambda matrix, start, in_group: lax.dynamic_slice_in_dim(
        matrix, start, len(in_group)
    ),
    "_matmul": lambda left, right, contract: (
        matmul(left, right, contract).astype(jnp.bfloat16) * 1.0
    ),
}


MATMUL_ACTIVATION = {
    "activate": lambda name, pre: reference_activate(name, pre * (1 + 2.0**-9)),  # not what is kept
    "_group_of_rows": lambda sizes, num_rows: jnp.zeros(num_rows, jnp.int32),
    "_matmul": MATMUL["_matmul"],
}


def check_dispatch(sizes=DOMAINS):
    rng = np.random.default_rng(0)
    ids = testing.routings(sizes, seed=1)["repeats"]
    x = testing.random_values(rng, (*ids.shape[:2], sizes.hidden))
    x[:, :, 0] *= np.float32(2.0**-130)  # subnormal
    weights = testing.random_values(rng, ids.shape)
    f = testing.sharded(lambda *a: sizes.dispatch(*a, implementation="xla"), sizes.mesh)
    sent = f(*testing.merge_ranks((x, ids, weights)))
    plans = sizes.plans(ids)
    assert sum(int(plan.num_dropped[0]) for plan in plans) > 0
    testing.assert_plan(sent.plan, plans)
    expected = numpy_moe.dispatch(x, weights, plans)
    testing.assert_bitwise(testing.split_ranks(sent.rows, sizes.num_ranks), expected[0])
    testing.assert_bitwise(testing.split_ranks(sent.row_weights, sizes.num_ranks), expected[1])


def check_combine(dtype=np.float32, sizes=SIZES):
    rng = np.random.default_rng(0)
    ids = testing.routings(sizes, seed=1)["repeats"]
    plans = sizes.plans(ids)
    y = testing.random_values(rng, (sizes.num_ranks, sizes.recv_capacity, sizes.hidden), dtype)
    row_weights = testing.random_values(rng, y.shape[:2])

    def f(ids, y, row_weights):
        # The plan is made by numpy: only combine is under test.
        plan = sizes.dispatch(sizes.nothing(y.dtype), ids, None).plan
        return jax_ep.combine(y, plan, row_weights, implementation="xla")

    out = testing.sharded(f, sizes.mesh)(*testing.merge_ranks((ids, y, row_weights)))
    expected = numpy_moe.combine(y, plans, row_weights)
    testing.assert_bitwise(testing.split_ranks(out, sizes.num_ranks), expected)


def check_matmul():
    """Forward and the gradient of the matrices, with poison past the last group."""
    rng = np.random.default_rng(0)
    lhs, rhs, bar = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((9, 4), (3, 4, 5), (9, 5))
    )
    sizes = np.array([3, 0, 4], np.int32)
    lhs[7:] = bar[7:] = np.nan
    call = lambda lhs, rhs: jax_ep.grouped_matmul(lhs, rhs, sizes, implementation="xla")
    out, gradients = jax.jit(
        lambda lhs, rhs, bar: (call(lhs, rhs), jax.vjp(call, lhs, rhs)[1](bar))
    )(lhs, rhs, bar)
    expected = numpy_moe.grouped_matmul_gradient(lhs, rhs, sizes, bar)
    testing.assert_close(out[:7], numpy_moe.grouped_matmul(lhs, rhs, sizes)[:7])
    testing.assert_close(gradients[1], expected[1])


def check_matmul_activation():
    """The kept pre-activation is that of numpy, and the output its square, rounded once."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(jnp.bfloat16)
    lhs, rhs, bias = draw(64, 40), draw(2, 40, 24), draw(2, 24).astype(np.float32)
    sizes = np.array([30, 34], np.int32)
    params = GroupedMatmulActivationParams("relu2", 0, "xla")
    call = lambda *a: bind_activation(*a, None, params, keep_pre_activation=True)
    out, pre = jax.jit(call)(lhs, rhs, sizes, bias)
    _, exact = grouped.matmul_activation("relu2", lhs, rhs, sizes, bias)
    magnitudes, _ = grouped.matmul_activation("none", abs(lhs), abs(rhs), sizes, abs(bias))
    testing.assert_sums(pre, exact, magnitudes, 41)
    square = np.maximum(np.asarray(pre, np.float32), 0) ** 2
    testing.assert_bitwise(out, square.astype(jnp.bfloat16))


class MutationTest(parameterized.TestCase):
    @contextlib.contextmanager
    def broken(self, name, replacement, module=reference):
        """Until the end, the reference is broken, and a comparison fails."""
        self.assertTrue(hasattr(module, name))
        with (
            unittest.mock.patch.object(module, name, replacement),
            self.assertRaises(AssertionError),
        ):
            yield

    def test_intact(self):
        check_dispatch()
        for dtype in testing.ROW_DTYPES:
            check_combine(dtype)
        for sizes in ONE_RANK, DOMAINS:
            check_combine(jnp.bfloat16, sizes)

    @parameterized.parameters(*ROWS)
    def test_rows(self, replacement):
        with self.broken("_gather_rows", replacement):
            check_dispatch()

    @parameterized.parameters(*[(name, f) for name, fs in PLAN.items() for f in fs])
    def test_plan(self, name, replacement):
        with self.broken(name, replacement, reference_plan):
            check_dispatch()

    @parameterized.parameters(*[m for m in COMBINE if m[3].num_ranks > 2 or m[3] == ONE_RANK])
    def test_combine(self, name, replacement, dtype, sizes):
        with self.broken(name, replacement):
            check_combine(dtype, sizes)

    def test_rounding_of_a_ranks_sum(self):
        """Here the oracle is broken: it keeps partial sums in float32 between the ranks."""

        def without_rounding(y, plans, row_weights):
            return combine(y.astype(np.float32), plans, row_weights).astype(y.dtype)

        combine = numpy_moe.combine
        for dtype in (jnp.bfloat16, jnp.float16) if testing.NUM_DEVICES > 1 else ():
            with (
                unittest.mock.patch.object(numpy_moe, "combine", without_rounding),
                self.assertRaises(AssertionError),
            ):
                check_combine(dtype)

    @parameterized.parameters(*MATMUL.items())
    def test_grouped_matmul(self, name, replacement):
        check_matmul()
        with self.broken(name, replacement, reference_matmul):
            check_matmul()

    @parameterized.parameters(*MATMUL_ACTIVATION.items())
    def test_grouped_matmul_activation(self, name, replacement):
        check_matmul_activation()
        with self.broken(name, replacement, reference_matmul):
            check_matmul_activation()


if __name__ == "__main__":
    absltest.main()
