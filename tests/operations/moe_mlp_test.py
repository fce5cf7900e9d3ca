"""moe_mlp against the dense layer: values, statistics, and the forms of its arguments."""

from __future__ import annotations

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P
from moe_layers import (
    ACTIVATIONS,
    GATED,
    HIDDEN,
    INTERMEDIATE,
    MOST,
    SIZES,
    assert_stats,
    chunk_plans,
    kept_of,
    layer,
    numpy_layer,
    parameters,
)

import jax_ep


class ValuesTest(parameterized.TestCase):
    @parameterized.parameters(*ACTIVATIONS)
    def test_activations_with_biases(self, activation):
        p = parameters(gated=activation in GATED)
        for kind, ids in testing.routings(SIZES).items():
            out, stats = layer(activation=activation)(testing.merge_ranks(ids), *p.floats)
            plans = SIZES.plans(ids)  # repeats may go beyond the default capacity
            expected = numpy_layer(ids, p, ACTIVATIONS[activation], kept=kept_of(plans))
            testing.assert_close(testing.split_ranks(out, MOST), expected, kind, steps=64)
            assert_stats(stats, [plans], kind)

    @parameterized.parameters(
        {"biases": False}, {"weights": False}, {"biases": False, "weights": False}
    )
    def test_optional_arguments(self, **given):
        p = parameters(**given)
        ids = testing.routings(SIZES)["half"]
        out, _ = layer()(testing.merge_ranks(ids), *p.floats)
        expected = numpy_layer(ids, p, ACTIVATIONS["swiglu"])
        testing.assert_close(testing.split_ranks(out, MOST), expected, steps=64)

    def test_activation_of_ones_own(self):
        p = parameters()
        ids = testing.routings(SIZES)["uniform"]
        mine = lambda h: jnp.tanh(h[:, 0]) + h[:, 1]
        out, _ = layer(activation=mine)(testing.merge_ranks(ids), *p.floats)
        expected = numpy_layer(ids, p, lambda h: np.tanh(h[0]) + h[1])
        testing.assert_close(testing.split_ranks(out, MOST), expected, steps=64)

    @parameterized.product(dtype=[jnp.bfloat16, jnp.float16], weight_dtype=[None, jnp.float32])
    def test_half_precision_and_master_weights(self, dtype, weight_dtype):
        p = parameters(dtype=dtype, weight_dtype=weight_dtype)
        ids = testing.routings(SIZES)["uniform"]
        out, _ = layer()(testing.merge_ranks(ids), *p.floats)
        self.assertEqual(out.dtype, dtype)
        expected = numpy_layer(ids, p, ACTIVATIONS["swiglu"])
        testing.assert_close(testing.split_ranks(out, MOST), expected, steps=8)

    @parameterized.parameters(1, 2)
    def test_capacity_and_chunks(self, num_chunks):
        """Capacity is split over the chunks; dropped assignments are missing from the sum."""
        p = parameters()
        f = layer(recv_capacity=8, num_chunks=num_chunks)
        for kind in "uniform", "skewed", "to_one_rank", "bad_ids":
            ids = testing.routings(SIZES)[kind]
            out, stats = f(testing.merge_ranks(ids), *p.floats)
            chunks = chunk_plans(ids, num_chunks, recv_capacity=8 // num_chunks)
            kept = np.concatenate([kept_of(plans) for plans in chunks], axis=1)  # [R, T, K]
            expected = numpy_layer(ids, p, ACTIVATIONS["swiglu"], kept=kept)
            testing.assert_close(testing.split_ranks(out, MOST), expected, kind, steps=64)
            assert_stats(stats, chunks, kind)

    def test_is_made_of_the_three_operations(self):
        p = parameters(biases=False)
        ids = testing.routings(SIZES)["uniform"]

        def by_hand(ids, x, topk_weights, w_up, w_down):
            sent = SIZES.dispatch(x, ids, topk_weights)
            h = jax_ep.grouped_matmul(sent.rows, w_up.reshape(2, HIDDEN, -1), sent.group_sizes)
            h = h.reshape(-1, 2, INTERMEDIATE)
            activations = jax.nn.silu(h[:, 0]) * h[:, 1]
            y = jax_ep.grouped_matmul(activations, w_down, sent.group_sizes)
            return jax_ep.combine(y, sent.plan, sent.row_weights)

        arguments = (testing.merge_ranks(ids), *p.floats[:4])
        expected = testing.sharded(by_hand, SIZES.mesh)(*arguments)
        out, _ = layer()(testing.merge_ranks(ids), *p.floats)
        testing.assert_close(out, np.asarray(expected))


class WeightFormsTest(parameterized.TestCase):
    """[L, H, 2, F], [L, H, 2F] and a (gate, up) pair hold the same experts."""

    FORMS = {
        "stacked": lambda a: a,
        "flat": lambda a: a.reshape(*a.shape[:-2], -1),
        "pair": lambda a: (a[..., 0, :], a[..., 1, :]),
    }

    def value_and_gradients(self, form, p, ids):
        ids = testing.merge_ranks(ids)

        def loss(floats):
            x, topk_weights, w_up, w_down, b_up, b_down = floats
            given = (x, topk_weights, self.FORMS[form](w_up), w_down, self.FORMS[form](b_up))
            return jnp.sin(layer()(ids, *given, b_down)[0]).sum()

        return jax.jit(jax.value_and_grad(loss))(p.floats)

    @parameterized.parameters("flat", "pair")
    def test_same_bits(self, form):
        p, ids = parameters(), testing.routings(SIZES)["half"]
        expected = self.value_and_gradients("stacked", p, ids)
        got = self.value_and_gradients(form, p, ids)
        jax.tree.map(testing.assert_bitwise, got, expected)

    def test_weights_on_every_rank_are_refused(self):
        """In silence, every token would go to rank 0."""
        p, ids = parameters(biases=False), testing.routings(SIZES)["uniform"]

        def run(num_experts, check_vma):
            f = jax.shard_map(
                lambda ids, x, weights, w_up, w_down: jax_ep.moe_mlp(
                    x, ids, weights, w_up, w_down, axis_name="expert", num_experts=num_experts
                )[0],
                mesh=SIZES.mesh,
                in_specs=(P("expert"),) * 3 + (P(), P()),
                out_specs=P("expert"),
                check_vma=check_vma,
            )
            return jax.jit(f)(testing.merge_ranks(ids), *p.floats[:4])

        if MOST > 1:  # one rank has all experts
            with self.assertRaisesRegex(ValueError, "w_up .* is the same on all .*PartitionSpec"):
                run(None, True)
            with self.assertRaisesRegex(
                ValueError, f"num_experts is not given .*={2 * MOST * MOST}"
            ):
                run(None, False)
        for check_vma in True, False:
            with self.assertRaisesRegex(ValueError, f"w_up has {2 * MOST} experts .*PartitionSpec"):
                run((MOST + 1) * SIZES.num_experts, check_vma)

    def test_equal_experts_on_every_rank_may_be_asked_for(self):
        p, ids = parameters(biases=False), testing.routings(SIZES)["uniform"]
        p.w_up, p.w_down = (np.concatenate([w[:2]] * MOST) for w in (p.w_up, p.w_down))
        expected, _ = layer()(testing.merge_ranks(ids), *p.floats)
        f = jax.shard_map(
            lambda ids, x, weights, w_up, w_down: jax_ep.moe_mlp(
                x, ids, weights, w_up, w_down, axis_name="expert", num_experts=SIZES.num_experts
            )[0],
            mesh=SIZES.mesh,
            in_specs=(P("expert"),) * 3 + (P(), P()),
            out_specs=P("expert"),
        )
        got = jax.jit(f)(testing.merge_ranks(ids), p.x, p.topk_weights, p.w_up[:2], p.w_down[:2])
        testing.assert_bitwise(got, np.asarray(expected))


class NoTokensTest(parameterized.TestCase):
    @parameterized.parameters({}, {"capacity_factor": 1.5}, {"remat": None})
    def test_values_and_gradients(self, **options):
        """A rank without tokens, as at the end of a batch: empty results, zero gradients."""
        p = parameters()
        p.x, p.topk_weights = p.x[:0], p.topk_weights[:0]
        ids = np.zeros((0, SIZES.top_k), np.int32)
        out, stats = layer(**options)(ids, *p.floats)
        self.assertEqual(out.shape, (0, HIDDEN))
        self.assertFalse(np.asarray(stats.num_received).any())
        loss = lambda floats: layer(**options)(ids, *floats)[0].sum()
        for name, a in zip(vars(p), jax.jit(jax.grad(loss))(p.floats), strict=True):
            self.assertFalse(np.asarray(a).any(), name)


class StatsTest(absltest.TestCase):
    def test_one_spec_takes_all_of_it_out(self):
        """A pytree whose arrays have one dimension; it is the same for any num_chunks."""
        p, ids = parameters(), testing.routings(SIZES)["skewed"]
        for num_chunks in 1, 2:
            _, stats = layer(num_chunks=num_chunks)(testing.merge_ranks(ids), *p.floats)
            self.assertIsInstance(stats, jax_ep.Stats)
            self.assertEqual(stats.expert_rows.shape, (SIZES.num_experts,))
            for name in "num_dropped", "num_received", "num_bad_ids", "status":
                self.assertEqual(getattr(stats, name).shape, (MOST,), name)
            assert_stats(stats, chunk_plans(ids, num_chunks))


if __name__ == "__main__":
    absltest.main()
