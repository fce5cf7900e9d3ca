"""Routers and load statistics against loop-written numpy."""

from __future__ import annotations

import inspect

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P

from jax_ep import routing
from jax_ep._src.core import errors

NUM_TOKENS, NUM_EXPERTS, TOP_K = 48, 16, 4


def random_logits(seed: int = 0, num_experts: int = NUM_EXPERTS) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(NUM_TOKENS, num_experts)).astype(np.float32)


def numpy_select(
    scores: np.ndarray, top_k: int, num_groups: int = 1, top_groups: int = 1, num_summed: int = 2
) -> np.ndarray:
    """Token by token; ties to the lower id. A group is rated by the sum of its `num_summed` best."""
    num_experts = scores.shape[-1]
    group_size = num_experts // num_groups
    ids = np.zeros((len(scores), top_k), np.int32)
    for token, row in enumerate(scores):
        groups = row.reshape(num_groups, group_size)
        best = np.sort(groups, axis=1)[:, -num_summed:].sum(1)
        chosen = sorted(range(num_groups), key=lambda g: (-best[g], g))[:top_groups]
        candidates = [e for e in range(num_experts) if e // group_size in chosen]
        ids[token] = sorted(candidates, key=lambda e: (-row[e], e))[:top_k]
    return ids


def softmax(logits: np.ndarray) -> np.ndarray:
    exp = np.exp(logits - logits.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))


class RouterTest(parameterized.TestCase):
    @parameterized.product(renormalize=[False, True], dtype=[jnp.float32, jnp.bfloat16])
    def test_softmax_topk(self, renormalize: bool, dtype: jnp.dtype):
        logits = jnp.asarray(random_logits(), dtype)
        got = jax.jit(lambda x: routing.softmax_topk(x, TOP_K, renormalize=renormalize))(logits)
        probabilities = softmax(np.asarray(logits, np.float32))
        ids = numpy_select(probabilities, TOP_K)
        weights = np.take_along_axis(probabilities, ids, -1)
        if renormalize:
            weights /= weights.sum(-1, keepdims=True)
        np.testing.assert_array_equal(got.topk_ids, ids)
        np.testing.assert_allclose(got.topk_weights, weights, rtol=1e-5)
        np.testing.assert_allclose(got.probabilities, probabilities, rtol=1e-5)
        self.assertEqual(got.topk_ids.dtype, jnp.int32)
        self.assertEqual(got.topk_weights.dtype, jnp.float32)
        self.assertEqual(got.probabilities.dtype, jnp.float32)

    @parameterized.parameters(False, True)
    def test_sigmoid_topk(self, renormalize: bool):
        logits = random_logits(1)
        got = routing.sigmoid_topk(jnp.asarray(logits), TOP_K, renormalize=renormalize, scale=2.5)
        scores = sigmoid(logits)
        ids = numpy_select(scores, TOP_K)
        weights = np.take_along_axis(scores, ids, -1)
        if renormalize:
            weights /= weights.sum(-1, keepdims=True)
        np.testing.assert_array_equal(got.topk_ids, ids)
        np.testing.assert_allclose(got.topk_weights, 2.5 * weights, rtol=1e-5)
        np.testing.assert_allclose(got.probabilities.sum(-1), 1, rtol=1e-5)

    @parameterized.parameters(routing.softmax_topk, routing.sigmoid_topk)
    def test_experts_disabled_by_logits_have_no_weight(self, router):
        logits = np.full((2, NUM_EXPERTS), -np.inf, np.float32)
        logits[0, 5] = logits[1, 0] = -50
        bias = np.zeros(NUM_EXPERTS, np.float32)
        bias[0] = -np.inf  # so token 1 has only disabled experts to choose

        def weights(logits):
            return router(logits, TOP_K, bias=jnp.asarray(bias)).topk_weights

        got, gradient = jax.value_and_grad(lambda x: (weights(x) ** 2).sum())(jnp.asarray(logits))
        self.assertEqual(got, 1)
        np.testing.assert_array_equal(weights(logits)[1], 0)
        np.testing.assert_array_equal(gradient, 0)

    @parameterized.parameters(routing.softmax_topk, routing.sigmoid_topk)
    def test_bias_picks_and_unbiased_scores_weigh(self, router):
        logits = random_logits(2)
        bias = np.zeros(NUM_EXPERTS, np.float32)
        bias[[3, 5]] = 10
        got = router(jnp.asarray(logits), TOP_K, bias=jnp.asarray(bias), renormalize=False)
        scores = softmax(logits) if router is routing.softmax_topk else sigmoid(logits)
        ids = numpy_select(scores + bias, TOP_K)
        np.testing.assert_array_equal(got.topk_ids, ids)
        self.assertTrue(np.isin([3, 5], got.topk_ids[0]).all())
        np.testing.assert_allclose(got.topk_weights, np.take_along_axis(scores, ids, -1), rtol=1e-5)

    @parameterized.parameters((4, 2), (8, 3), (16, 5), (2, 1), (4, 4))
    def test_group_limited(self, num_groups: int, top_groups: int):
        logits = random_logits(3)
        bias = np.random.default_rng(4).normal(size=NUM_EXPERTS).astype(np.float32)
        got = routing.sigmoid_topk(
            jnp.asarray(logits),
            TOP_K,
            bias=jnp.asarray(bias),
            num_groups=num_groups,
            top_groups=top_groups,
        )
        ids = numpy_select(sigmoid(logits) + bias, TOP_K, num_groups, top_groups)
        np.testing.assert_array_equal(got.topk_ids, ids)
        groups = np.asarray(got.topk_ids) // (NUM_EXPERTS // num_groups)
        self.assertLessEqual(max(len(set(row)) for row in groups), top_groups)

    @parameterized.product(groups=[(4, 2), (8, 3), (2, 1), (16, 5)], renormalize=[False, True])
    def test_deepseek_v2(self, groups: tuple[int, int], renormalize: bool):
        """Groups by their maximum, and weights times a factor, in values and gradients."""
        num_groups, top_groups = groups
        options = dict(num_groups=num_groups, top_groups=top_groups, group_score="max")
        logits = random_logits(3)
        target = np.random.default_rng(4).normal(size=(NUM_TOKENS, TOP_K)).astype(np.float32)
        ids = numpy_select(softmax(logits), TOP_K, num_groups, top_groups, num_summed=1)
        if num_groups in (4, 8):
            self.assertTrue((ids != numpy_select(softmax(logits), TOP_K, *groups)).any())

        def with_router(logits):
            got = routing.softmax_topk(
                logits, TOP_K, renormalize=renormalize, scale=16.0, **options
            )
            return (got.topk_weights * target).sum(), got

        def dense(logits):
            weights = jnp.take_along_axis(jax.nn.softmax(logits), ids, -1)
            if renormalize:
                weights /= weights.sum(-1, keepdims=True)
            return (16.0 * weights * target).sum(), 16.0 * weights

        (_, got), gradient = jax.value_and_grad(with_router, has_aux=True)(jnp.asarray(logits))
        (_, weights), expected = jax.value_and_grad(dense, has_aux=True)(jnp.asarray(logits))
        np.testing.assert_array_equal(got.topk_ids, ids)
        np.testing.assert_array_equal(routing.select(softmax(logits), TOP_K, **options), ids)
        np.testing.assert_allclose(got.topk_weights, weights, rtol=1e-5)
        np.testing.assert_allclose(got.probabilities, softmax(logits), rtol=1e-5)
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)
        sigmoids = routing.sigmoid_topk(jnp.asarray(logits), TOP_K, **options)
        expected = numpy_select(sigmoid(logits), TOP_K, num_groups, top_groups, num_summed=1)
        np.testing.assert_array_equal(sigmoids.topk_ids, expected)

    @parameterized.parameters(routing.softmax_topk, routing.sigmoid_topk)
    def test_ties_go_to_the_lower_id(self, router):
        got = router(jnp.zeros((3, NUM_EXPERTS)), TOP_K, num_groups=4, top_groups=2)
        np.testing.assert_array_equal(got.topk_ids, np.tile(np.arange(TOP_K), (3, 1)))

    @parameterized.parameters(routing.softmax_topk, routing.sigmoid_topk)
    def test_nan_logits_give_valid_ids_and_nan_weights(self, router):
        logits = random_logits(5)
        logits[0] = np.nan
        logits[1, :6] = np.nan
        logits[2, 7] = np.nan
        got = router(jnp.asarray(logits), TOP_K, num_groups=4, top_groups=2)
        ids = np.asarray(got.topk_ids)
        self.assertTrue(((ids >= 0) & (ids < NUM_EXPERTS)).all())
        self.assertTrue(all(len(set(row)) == TOP_K for row in ids))
        np.testing.assert_array_equal(ids[0], np.arange(TOP_K))
        self.assertTrue(np.isnan(got.topk_weights[0]).all())
        self.assertTrue(np.isnan(got.probabilities[:3]).all())
        if router is routing.softmax_topk:  # also where no selected logit is NaN
            self.assertTrue(np.isnan(got.topk_weights[:3]).all())
        self.assertTrue(np.isfinite(got.topk_weights[3:]).all())

    def test_nan_ranks_last_but_within_the_chosen_groups(self):
        scores = jnp.asarray([[9, jnp.nan, 8, 7, 1, 1, 1, 1]])
        ids = routing.select(scores, 4, num_groups=2, top_groups=1)
        # Group 0 has the larger sum although one of its four is NaN: it still fills the choice.
        np.testing.assert_array_equal(ids, [[0, 2, 3, 1]])

    def test_disabled_expert_is_picked_last(self):
        bias = jnp.zeros(4).at[2].set(-jnp.inf)
        ids = routing.select(jnp.asarray([[0.1, 0.2, 0.9, 0.4]]), 4, bias=bias)
        np.testing.assert_array_equal(ids, [[3, 1, 0, 2]])

    @parameterized.parameters(routing.softmax_topk, routing.sigmoid_topk)
    def test_token_mask(self, router):
        logits = random_logits(6)
        logits[::3] = np.nan
        mask = np.arange(NUM_TOKENS) % 3 != 0

        def total(logits):
            got = router(logits, TOP_K, token_mask=jnp.asarray(mask))
            loss = routing.balancing_loss(got.probabilities, got.topk_ids)
            loss += routing.z_loss(logits, token_mask=jnp.asarray(mask))
            return loss + (got.topk_weights**2).sum(), got

        (_, got), gradient = jax.value_and_grad(total, has_aux=True)(jnp.asarray(logits))
        np.testing.assert_array_equal(got.topk_ids[::3], -1)
        np.testing.assert_array_equal(got.topk_weights[::3], 0)
        np.testing.assert_array_equal(got.probabilities[::3], 0)
        np.testing.assert_array_equal(gradient[::3], 0)
        self.assertTrue(np.isfinite(gradient).all())
        # The others are routed as if the masked tokens did not exist.
        alone = router(jnp.asarray(logits[mask]), TOP_K)
        np.testing.assert_array_equal(got.topk_ids[mask], alone.topk_ids)
        np.testing.assert_allclose(
            routing.balancing_loss(got.probabilities, got.topk_ids),
            routing.balancing_loss(alone.probabilities, alone.topk_ids),
            rtol=1e-6,
        )

    def test_vmap_and_leading_dimensions(self):
        logits = jnp.asarray(random_logits(7)).reshape(4, 12, NUM_EXPERTS)
        flat = routing.softmax_topk(logits.reshape(-1, NUM_EXPERTS), TOP_K)
        for got in (
            routing.softmax_topk(logits, TOP_K),
            jax.vmap(lambda x: routing.softmax_topk(x, TOP_K))(logits),
        ):
            np.testing.assert_array_equal(got.topk_ids.reshape(-1, TOP_K), flat.topk_ids)
            np.testing.assert_array_equal(got.topk_weights.reshape(-1, TOP_K), flat.topk_weights)

    def test_gradient_of_weights(self):
        logits = jnp.asarray(random_logits(8))
        ids = routing.softmax_topk(logits, TOP_K).topk_ids
        target = jnp.asarray(np.random.default_rng(9).normal(size=(NUM_TOKENS, TOP_K)))

        def with_router(logits):
            return (routing.softmax_topk(logits, TOP_K).topk_weights * target).sum()

        def dense(logits):  # a softmax over the chosen logits is the renormalised softmax
            chosen = jnp.take_along_axis(logits, ids, -1)
            return (jax.nn.softmax(chosen) * target).sum()

        np.testing.assert_allclose(
            jax.grad(with_router)(logits), jax.grad(dense)(logits), rtol=1e-4, atol=1e-6
        )

    @parameterized.parameters(
        dict(top_k=0), dict(top_k=17), dict(top_k=2, num_groups=3),
        dict(top_k=2, num_groups=4, top_groups=5), dict(top_k=5, num_groups=4, top_groups=1),
    )  # fmt: skip
    def test_errors(self, top_k: int, **kwargs):
        with self.assertRaises(errors.ArgumentError):
            routing.softmax_topk(jnp.zeros((2, NUM_EXPERTS)), top_k, **kwargs)

    def test_errors_of_shapes_and_types(self):
        logits = jnp.zeros((2, NUM_EXPERTS))
        with self.assertRaisesRegex(errors.ArgumentError, "bias has shape"):
            routing.softmax_topk(logits, 2, bias=jnp.zeros(NUM_EXPERTS - 1))
        with self.assertRaisesRegex(errors.ArgumentError, "logits has shape"):
            routing.softmax_topk(logits[0, 0], 2)
        with self.assertRaisesRegex(errors.ArgumentError, "group_score='sum'; expected one of"):
            routing.softmax_topk(logits, 2, group_score="sum")
        with self.assertRaisesRegex(errors.DtypeError, "num_groups=2.0"):
            routing.softmax_topk(logits, 2, num_groups=2.0)

    def test_no_rank_promotion(self):
        """Every public function runs where JAX forbids operands of different ranks."""
        logits = jnp.asarray(random_logits())
        bias, mask = jnp.ones(NUM_EXPERTS), jnp.ones(NUM_TOKENS, jnp.bool_)
        limited = dict(bias=bias, num_groups=4, top_groups=2)
        ids, _, probabilities = routing.softmax_topk(logits, TOP_K)
        counts = routing.load(ids, NUM_EXPERTS)
        calls = {
            "softmax_topk": lambda: routing.softmax_topk(logits, 2, token_mask=mask, **limited),
            "sigmoid_topk": lambda: routing.sigmoid_topk(logits, 2, token_mask=mask, **limited),
            "select": lambda: routing.select(logits, 2, **limited),
            "load": lambda: routing.load(ids, NUM_EXPERTS),
            "load_fractions": lambda: routing.load_fractions(counts),
            "balancing_loss": lambda: routing.balancing_loss(probabilities, ids),
            "z_loss": lambda: routing.z_loss(logits, token_mask=mask),
            "updated_bias": lambda: routing.updated_bias(bias, counts),
        }
        functions = dict(inspect.getmembers(routing, inspect.isfunction)).values()
        own = {f.__name__ for f in functions if f.__module__.startswith("jax_ep")}
        self.assertSameElements(calls, {name for name in own if name[0] != "_"})
        with jax.numpy_rank_promotion("raise"):
            for name, call in calls.items():
                with self.subTest(name):
                    call()
            for router in routing.softmax_topk, routing.sigmoid_topk:
                with self.subTest(f"gradient of {router.__name__}"):
                    jax.grad(lambda x, router=router: router(x, 2).topk_weights[0, 0])(logits)
            jax.grad(lambda x: routing.z_loss(x, token_mask=mask))(logits)
            jax.grad(lambda x: routing.balancing_loss(x, ids))(probabilities)


class LoadTest(parameterized.TestCase):
    def test_counts_and_fractions(self):
        ids = jnp.asarray([[0, 3], [3, -1], [2, 99]], jnp.int32)
        counts = routing.load(ids, 4)
        np.testing.assert_array_equal(counts, [1, 0, 1, 2])
        self.assertEqual(counts.dtype, jnp.int32)
        np.testing.assert_allclose(routing.load_fractions(counts), [0.25, 0, 0.25, 0.5])
        np.testing.assert_array_equal(routing.load_fractions(jnp.zeros(4, jnp.int32)), 0)
        np.testing.assert_allclose(routing.load_fractions(jnp.asarray([0.1, 0.3])), [0.25, 0.75])

    @parameterized.parameters(((1, 2),), ((47, 2),), ((2, 24, 2),), ((2,),), ((),))
    def test_balancing_loss_of_other_tokens(self, shape: tuple[int, ...]):
        with self.assertRaisesRegex(errors.ArgumentError, "topk_ids has shape"):
            routing.balancing_loss(jnp.zeros((48, 4)), jnp.zeros(shape, jnp.int32))

    @parameterized.parameters(((4,), (1,)), ((4,), (5,)), ((4,), (3, 4)), ((1,), (4,)), ((4,), ()))
    def test_updated_bias_of_other_experts(self, bias: tuple[int, ...], counts: tuple[int, ...]):
        with self.assertRaisesRegex(errors.ArgumentError, "counts has shape"):
            routing.updated_bias(jnp.zeros(bias), jnp.zeros(counts, jnp.int32))

    def test_arrays_without_experts(self):
        zero = jnp.zeros(())
        for name, call in {
            "probabilities": lambda: routing.balancing_loss(zero, zero),
            "bias": lambda: routing.updated_bias(zero, zero),
            "scores": lambda: routing.select(zero, 1),
            "counts": lambda: routing.load_fractions(zero),
        }.items():
            with self.assertRaisesRegex(errors.ArgumentError, f"{name} has shape"):
                call()

    def test_balancing_loss(self):
        got = routing.softmax_topk(jnp.asarray(random_logits()), TOP_K)
        loss = routing.balancing_loss(got.probabilities, got.topk_ids)
        counts = np.bincount(np.asarray(got.topk_ids).ravel(), minlength=NUM_EXPERTS)
        mean = np.asarray(got.probabilities).mean(0)
        expected = NUM_EXPERTS * (counts / counts.sum() * mean).sum()
        np.testing.assert_allclose(loss, expected, rtol=1e-5)

    def test_balancing_loss_is_one_when_even_and_e_at_worst(self):
        even = jnp.full((NUM_EXPERTS, NUM_EXPERTS), 1 / NUM_EXPERTS)
        ids = jnp.arange(NUM_EXPERTS)[:, None]
        np.testing.assert_allclose(routing.balancing_loss(even, ids), 1, rtol=1e-6)
        worst = jnp.zeros((5, NUM_EXPERTS)).at[:, 2].set(1)
        loss = routing.balancing_loss(worst, jnp.full((5, 1), 2))
        np.testing.assert_allclose(loss, NUM_EXPERTS)

    def test_losses_of_no_tokens_are_zero(self):
        ids = jnp.full((3, TOP_K), -1)
        self.assertEqual(routing.balancing_loss(jnp.zeros((3, NUM_EXPERTS)), ids), 0)
        mask = jnp.zeros(3, jnp.bool_)
        self.assertEqual(routing.z_loss(jnp.zeros((3, NUM_EXPERTS)), token_mask=mask), 0)

    def test_z_loss(self):
        logits = random_logits()
        expected = (np.log(np.exp(logits).sum(-1)) ** 2).mean()
        np.testing.assert_allclose(routing.z_loss(jnp.asarray(logits)), expected, rtol=1e-5)

    def test_a_mask_of_integers_is_not_summed(self):
        """Segment ids, say: all but 0 are tokens."""
        logits = jnp.asarray(random_logits())
        mask = jnp.arange(logits.shape[0]) % 4
        expected = routing.z_loss(logits, token_mask=mask != 0)
        for dtype in np.int32, np.uint8, np.int8:
            ids = (mask * -85).astype(dtype)
            testing.assert_bitwise(routing.z_loss(logits, token_mask=ids), expected)
        with self.assertRaisesRegex(errors.ArgumentError, "token_mask has shape"):
            routing.softmax_topk(logits, 1, token_mask=mask[1:])

    @parameterized.parameters(None, 3)
    def test_global_statistics_and_gradients_in_shard_map(self, masked_every: int | None):
        """Sharding the tokens changes neither losses nor gradients."""
        logits = jnp.asarray(random_logits())
        mask = None
        if masked_every is not None:
            mask = jnp.arange(NUM_TOKENS) % masked_every != 0

        def losses(logits, mask, token_axes=None):
            got = routing.softmax_topk(logits, TOP_K, token_mask=mask)
            balancing = routing.balancing_loss(
                got.probabilities, got.topk_ids, token_axes=token_axes
            )
            z = routing.z_loss(logits, token_mask=mask, token_axes=token_axes)
            return balancing + 0.1 * z, routing.load(
                got.topk_ids, NUM_EXPERTS, token_axes=token_axes
            )

        mesh = testing.mesh_of((2, 4), ("data", "expert"))
        axes = ("data", "expert")
        sharded = jax.shard_map(
            lambda logits, mask: losses(logits, mask, axes),
            mesh=mesh,
            in_specs=(P(axes), P(axes)),
            out_specs=P(),
        )
        placed = jax.device_put((logits, mask), jax.NamedSharding(mesh, P(axes)))
        expected, expected_gradient = jax.value_and_grad(losses, has_aux=True)(logits, mask)
        got, gradient = jax.jit(jax.value_and_grad(sharded, has_aux=True))(*placed)
        np.testing.assert_allclose(got[0], expected[0], rtol=1e-6)
        np.testing.assert_array_equal(got[1], expected[1])
        np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-8)

    def test_updated_bias_evens_the_load(self):
        logits = jnp.asarray(random_logits()).at[:, 0].add(3.0)

        def counts(bias):
            got = routing.sigmoid_topk(logits, TOP_K, bias=bias)
            return routing.load(got.topk_ids, NUM_EXPERTS)

        first = counts(jnp.zeros(NUM_EXPERTS))
        bias = jnp.zeros(NUM_EXPERTS)
        for _ in range(300):
            bias = routing.updated_bias(bias, counts(bias), rate=5e-3)
        self.assertGreater(first.max(), 3 * first.mean())
        self.assertLess(counts(bias).max(), 1.5 * first.mean())

    @parameterized.parameters(7, 60, 61)
    def test_updated_bias_leaves_an_even_load_alone(self, num_experts: int):
        """XLA divides by a constant by multiplying with its rounded reciprocal."""
        update = jax.jit(routing.updated_bias)
        bias = update(jnp.zeros(num_experts), jnp.full(num_experts, 100))
        np.testing.assert_array_equal(bias, 0)
        stacked = update(jnp.zeros((2, 3)), jnp.asarray([[1, 2, 3], [5, 5, 5]]))
        np.testing.assert_allclose(stacked, [[1e-3, 0, -1e-3], [0, 0, 0]])


if __name__ == "__main__":
    absltest.main()
