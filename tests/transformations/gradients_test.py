"""Gradients of dispatch and combine: the contract's formulas in numpy, finite differences, exact zeros, poison."""

from __future__ import annotations

import functools

import testing  # isort: skip

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import numpy_moe
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P
from testing import Sizes

import jax_ep

MOST = testing.NUM_DEVICES
ODD = testing.rank_counts(1, 3)[-1]

SIZES = {
    "usual": Sizes(MOST, num_local=2, num_tokens=5, top_k=3, row_align=4),
    "dropping": Sizes(ODD, num_local=3, num_tokens=8, top_k=3, row_align=2, recv_capacity=20),
}


@functools.cache
def dispatch_backward(sizes: Sizes, zero_tail: bool):
    def f(x, ids, weights, rows_bar, row_weights_bar):
        def forward(x, weights):
            sent = sizes.dispatch(x, ids, weights, zero_tail=zero_tail)
            return sent.rows, sent.row_weights

        return jax.vjp(forward, x, weights)[1]((rows_bar, row_weights_bar))

    return testing.sharded(f, sizes.mesh)


@functools.cache
def combine_backward(sizes: Sizes, zero_tail: bool):
    def f(ids, y, row_weights, out_bar):
        plan = sizes.dispatch(sizes.nothing(y.dtype), ids, None, zero_tail=zero_tail).plan
        forward = lambda y, row_weights: jax_ep.combine(y, plan, row_weights)
        return jax.vjp(forward, y, row_weights)[1](out_bar)

    return testing.sharded(f, sizes.mesh)


def poisoned(rng, plans, trailing, dtype=np.float32):
    """Values for every row, NaN where there is no token."""
    values = np.full((len(plans), len(plans[0].row_source), *trailing), np.nan, dtype)
    for rank, row, *_ in numpy_moe.real_rows(plans):
        values[rank, row] = testing.random_values(rng, trailing, dtype)
    return values


class DispatchTest(parameterized.TestCase):
    @parameterized.product(
        name=list(SIZES),
        dtypes=[(np.float32, np.float32), (jnp.bfloat16, np.float32), (jnp.float16, jnp.bfloat16)],
        zero_tail=[True, False],
    )
    def test_formulas(self, name, dtypes, zero_tail):
        """x's gradient is a combine, bit by bit; the weights' are their rows' cotangents."""
        sizes, (dtype, weights_dtype) = SIZES[name], dtypes
        rng = np.random.default_rng(0)
        backward = dispatch_backward(sizes, zero_tail)
        for kind, ids in testing.routings(sizes, seed=1).items():
            plans = sizes.plans(ids)
            x = testing.random_values(rng, (*ids.shape[:2], sizes.hidden), dtype)
            weights = testing.random_values(rng, ids.shape, weights_dtype)
            rows_bar = poisoned(rng, plans, (sizes.hidden,), dtype)
            row_weights_bar = poisoned(rng, plans, ())
            row_weights_bar[:, ::5] *= 0  # zeros of both signs
            arguments = testing.merge_ranks((x, ids, weights, rows_bar, row_weights_bar))
            got = testing.split_ranks(backward(*arguments), sizes.num_ranks)
            expected = numpy_moe.dispatch_gradient(rows_bar, row_weights_bar, plans, weights_dtype)
            testing.assert_bitwise(got[0], expected[0], kind)
            testing.assert_bitwise(got[1], expected[1], kind)
            lost = ~np.stack([plan.kept for plan in plans])
            testing.assert_bitwise(got[1][lost], np.zeros_like(got[1][lost]), kind)  # +0, exactly

    def test_redispatch(self):
        sizes = SIZES["dropping"]

        @functools.partial(testing.sharded, mesh=sizes.mesh)
        def backward(x, ids, weights, rows_bar, row_weights_bar):
            plan = sizes.dispatch(x, ids, None).plan

            def forward(x, weights):
                sent = jax_ep.redispatch(x, plan, weights)
                return sent.rows, sent.row_weights

            return jax.vjp(forward, x, weights)[1]((rows_bar, row_weights_bar))

        rng = np.random.default_rng(2)
        ids = testing.routings(sizes)["uniform"]
        plans = sizes.plans(ids)
        x = testing.random_values(rng, (*ids.shape[:2], sizes.hidden))
        weights = testing.random_values(rng, ids.shape)
        rows_bar, row_weights_bar = poisoned(rng, plans, (sizes.hidden,)), poisoned(rng, plans, ())
        arguments = testing.merge_ranks((x, ids, weights, rows_bar, row_weights_bar))
        got = testing.split_ranks(backward(*arguments), sizes.num_ranks)
        expected = numpy_moe.dispatch_gradient(rows_bar, row_weights_bar, plans)
        jax.tree.map(testing.assert_bitwise, got, expected)


class CombineTest(parameterized.TestCase):
    @parameterized.product(
        name=list(SIZES),
        dtypes=[(np.float32, np.float32), (jnp.bfloat16, np.float32), (jnp.float16, jnp.bfloat16)],
        zero_tail=[True, False],
    )
    def test_formulas(self, name, dtypes, zero_tail):
        sizes, (dtype, weights_dtype) = SIZES[name], dtypes
        rng = np.random.default_rng(3)
        backward = combine_backward(sizes, zero_tail)
        for kind, ids in testing.routings(sizes, seed=4).items():
            plans = sizes.plans(ids)
            y = poisoned(rng, plans, (sizes.hidden,), dtype)
            row_weights = poisoned(rng, plans, (), weights_dtype)
            out_bar = testing.random_values(rng, (*ids.shape[:2], sizes.hidden), dtype)
            arguments = testing.merge_ranks((ids, y, row_weights, out_bar))
            y_bar, weights_bar = testing.split_ranks(backward(*arguments), sizes.num_ranks)
            clean_y, wide = np.nan_to_num(y), np.nan_to_num(row_weights.astype(np.float32))
            expected = numpy_moe.combine_gradient(out_bar, clean_y, plans, wide)
            self.assertEqual((y_bar.dtype, weights_bar.dtype), (dtype, weights_dtype))
            if not zero_tail:  # unspecified, and NaN in the reference: compare the rest
                y_bar, weights_bar = y_bar.copy(), weights_bar.copy()
                numpy_moe.poison_tail(y_bar, plans, 0)
                numpy_moe.poison_tail(weights_bar, plans, 0)
            y_bar = np.where(y_bar == 0, np.zeros_like(y_bar), y_bar)  # -0 of a product is as good
            expected_y = np.where(expected[0] == 0, np.zeros_like(y_bar), expected[0])
            testing.assert_bitwise(y_bar, expected_y, kind)
            testing.assert_close(weights_bar, expected[1], kind)
            padding = np.ones(y.shape[:2], bool)
            for rank, row, *_ in numpy_moe.real_rows(plans):
                padding[rank, row] = False
            self.assertFalse(y_bar[padding].any(), kind)
            self.assertFalse(weights_bar[padding].any(), kind)

    def test_without_weights(self):
        sizes = SIZES["dropping"]
        ids = testing.routings(sizes)["uniform"]
        plans = sizes.plans(ids)
        rng = np.random.default_rng(5)
        y = poisoned(rng, plans, (sizes.hidden,))
        out_bar = testing.random_values(rng, (*ids.shape[:2], sizes.hidden))
        arguments = testing.merge_ranks((ids, y, None, out_bar))
        y_bar, weights_bar = combine_backward(sizes, True)(*arguments)
        self.assertIsNone(weights_bar)
        expected, _ = numpy_moe.combine_gradient(out_bar, y, plans, None)
        expected = np.where(np.isnan(expected), 0, expected).astype(np.float32)
        testing.assert_bitwise(testing.split_ranks(y_bar, sizes.num_ranks), expected)


def scaled_and_biased(sizes: Sizes, **kwargs):
    """A layer as a user would write it: norms, scales, biases and logarithms between the operations."""

    def f(x, ids, topk_weights, scale, bias, matrices):
        sent = sizes.dispatch(x, ids, topk_weights, **kwargs)
        rows, row_weights, sizes_of = sent.rows, sent.row_weights, sent.group_sizes
        expert = jnp.repeat(
            jnp.arange(sizes.num_local), sizes_of, total_repeat_length=rows.shape[0]
        )
        rows = rows * jax.lax.rsqrt(jnp.mean(rows**2, 1, keepdims=True) + 1e-6)
        y = jax_ep.grouped_matmul(rows * scale[expert], matrices, sizes_of) + bias[expert]
        y = jnp.log1p(jnp.exp(y)) * jnp.sqrt(1 + jnp.abs(row_weights))[:, None]
        return jax_ep.combine(y, sent.plan, row_weights)

    return testing.sharded(f, sizes.mesh)


class WholeTest(parameterized.TestCase):
    def arguments(self, sizes: Sizes, kind="half"):
        rng = np.random.default_rng(6)
        ids = testing.routings(sizes)[kind]
        num_experts, hidden = sizes.num_experts, sizes.hidden
        floats = [
            rng.standard_normal((ids.shape[0] * ids.shape[1], hidden)),
            rng.random((ids.shape[0] * ids.shape[1], ids.shape[2])) + 0.1,
            rng.standard_normal((num_experts, hidden)),
            rng.standard_normal((num_experts, hidden)),
            rng.standard_normal((num_experts, hidden, hidden)),
        ]
        x, weights, *parameters = (a.astype(np.float32) for a in floats)
        return ids, (x, weights, *parameters)

    @staticmethod
    @functools.cache
    def losses(sizes: Sizes):
        """(floats, ids) -> value and gradient, by `scaled_and_biased` and by the same without experts apart."""
        layer = scaled_and_biased(sizes)

        def loss(floats, ids):
            x, weights, *parameters = floats
            return jnp.sum(layer(x, ids, weights, *parameters) ** 2)

        def dense_loss(floats, ids):
            x, weights, scale, bias, matrices = floats
            unit = x * jax.lax.rsqrt(jnp.mean(x**2, 1, keepdims=True) + 1e-6)
            out = 0.0
            for k in range(sizes.top_k):
                e = jnp.maximum(ids[:, k], 0)
                y = jnp.einsum("th,thn->tn", unit * scale[e], matrices[e], precision="highest")
                w = jnp.where(ids[:, k] >= 0, weights[:, k], 0.0)[:, None]
                out += w * jnp.log1p(jnp.exp(y + bias[e])) * jnp.sqrt(1 + jnp.abs(w))
            return jnp.sum(out**2)

        return jax.jit(jax.value_and_grad(loss)), jax.jit(jax.value_and_grad(dense_loss))

    @parameterized.parameters("half", "none", "to_one_expert", "uniform")
    def test_user_code_in_between_has_finite_gradients_equal_to_the_dense_ones(self, kind):
        sizes = Sizes(MOST, num_local=2, num_tokens=4, top_k=2, row_align=8)
        ids, floats = self.arguments(sizes, kind)
        sparse, dense = self.losses(sizes)
        value, gradient = sparse(floats, testing.merge_ranks(ids))
        dense_value, dense_gradient = dense(floats, testing.merge_ranks(ids))
        np.testing.assert_allclose(value, dense_value, rtol=1e-5)
        for got, expected in zip(gradient, dense_gradient, strict=True):
            self.assertTrue(np.isfinite(got).all())
            testing.assert_close(got, expected, steps=256)

    def test_finite_differences(self):
        # on any number of ranks there are 8 assignments per rank, and room for 6
        sizes = Sizes(ODD, num_local=2, num_tokens=4, top_k=2, row_align=2, recv_capacity=6)
        ids, floats = self.arguments(sizes, "uniform")
        self.assertGreater(sum(int(plan.num_dropped[0]) for plan in sizes.plans(ids)), 0)
        layer = scaled_and_biased(sizes)

        def f(x, weights, *parameters):
            return layer(x, testing.merge_ranks(ids), weights, *parameters)

        jax.test_util.check_grads(f, floats, order=1, modes=["rev"], atol=2e-2, rtol=2e-2, eps=1e-2)

    def test_unspecified_tails_stay_out_of_gradients(self):
        """zero_tail=False: the tail is NaN in the reference; mask_tail keeps it out of user code."""
        sizes = Sizes(MOST, num_local=2, num_tokens=4, top_k=2)
        ids, (x, weights, scale, *_) = self.arguments(sizes)

        def f(x, ids, weights, scale):
            sent = sizes.dispatch(x, ids, weights, zero_tail=False)
            rows = jax_ep.mask_tail(sent.rows, sent.group_sizes)
            row_weights = jax_ep.mask_tail(sent.row_weights, sent.group_sizes)
            y = jnp.sin(rows) * scale.sum() * row_weights[:, None]
            return jax_ep.combine(jax_ep.mask_tail(y, sent.group_sizes), sent.plan, None)

        layer = testing.sharded(f, sizes.mesh)
        loss = lambda x, weights, scale: layer(x, testing.merge_ranks(ids), weights, scale).sum()
        for gradient in jax.jit(jax.grad(loss, (0, 1, 2)))(x, weights, scale):
            self.assertTrue(np.isfinite(gradient).all())

    def test_forward_mode_says_why_not(self):
        sizes = Sizes(MOST, num_local=2, num_tokens=4, top_k=2)
        ids, (x, weights, *parameters) = self.arguments(sizes)
        layer = scaled_and_biased(sizes)
        with self.assertRaisesRegex(TypeError, "forward-mode|jvp"):
            jax.jvp(lambda x: layer(x, testing.merge_ranks(ids), weights, *parameters), (x,), (x,))

    def test_second_derivatives_say_why_not(self):
        sizes = Sizes(MOST, num_local=2, num_tokens=4, top_k=2)
        ids, (x, weights, *parameters) = self.arguments(sizes)
        layer = scaled_and_biased(sizes)
        loss = lambda x: (layer(x, testing.merge_ranks(ids), weights, *parameters) ** 2).sum()
        first = jax.grad(loss)
        for transformed in (lambda f: f, jax.jit):
            with self.assertRaisesRegex(jax_ep.UnavailableError, "a derivative of a derivative"):
                transformed(jax.grad(lambda x: (first(x) ** 2).sum()))(x)
        # The advice holds.
        stopped = lambda x: (first(jax.lax.stop_gradient(x)) * x).sum()
        testing.assert_bitwise(jax.grad(stopped)(x), first(x))

    def test_integer_arguments_have_no_gradient(self):
        sizes = Sizes(MOST, num_local=2, num_tokens=4, top_k=2)
        ids, (x, *_) = self.arguments(sizes)
        f = jax.shard_map(
            lambda x, ids: sizes.dispatch(x, ids, None).rows,
            mesh=sizes.mesh,
            in_specs=P("expert"),
            out_specs=P("expert"),
        )
        out, backward = jax.vjp(f, x, testing.merge_ranks(ids))
        self.assertEqual(backward(out)[1].dtype, jax.dtypes.float0)


if __name__ == "__main__":
    absltest.main()
