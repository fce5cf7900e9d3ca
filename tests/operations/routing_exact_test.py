"""Routing weights, probabilities, losses and their gradients against exact quotients in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable

import testing  # isort: skip  # noqa: F401

import hypothesis
import hypothesis.extra.numpy
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from hypothesis import strategies as st

from jax_ep import routing

NUM_TOKENS, NUM_EXPERTS, TOP_K, SCALE = 6, 8, 3, 2.5
SHAPE = NUM_TOKENS, NUM_EXPERTS
settings = functools.partial(
    hypothesis.settings, max_examples=40, deadline=None, derandomize=True, database=None
)
arrays = functools.partial(hypothesis.extra.numpy.arrays, np.float32)


def floats(bound: float) -> st.SearchStrategy[float]:
    return st.floats(-bound, bound, width=32)


MASKED_LOGITS = [np.nan, np.inf, -np.inf]
LOGITS = st.one_of(
    arrays(SHAPE, elements=floats(8)),
    arrays(SHAPE, elements=floats(200)),
    arrays(SHAPE, elements=floats(1e4)),
    arrays(SHAPE, elements=st.sampled_from([-3e38, -1e4, -104, -88, -50, -17, 0, 17, 1e4, 3e38])),
    arrays(SHAPE, elements=st.one_of(st.just(-np.inf), floats(60))),
    arrays((NUM_TOKENS, 1), elements=floats(1e4)).map(lambda x: np.repeat(x, NUM_EXPERTS, 1)),
)
BIAS = arrays(NUM_EXPERTS, elements=st.sampled_from([0, 0, 0.1, -10, 10, -np.inf]))
MASK = hypothesis.extra.numpy.arrays(np.bool_, NUM_TOKENS)
COTANGENTS = arrays((NUM_TOKENS, TOP_K + NUM_EXPERTS), elements=floats(1))


def quotients(logs: np.ndarray) -> np.ndarray:
    """exp(logs) over their sum, or 0 where all of them are 0."""
    top = logs.max(-1, keepdims=True)
    scores = np.exp(logs - np.where(np.isneginf(top), 0, top))
    return scores / np.maximum(scores.sum(-1, keepdims=True), np.finfo(np.float64).tiny)


def quotients_gradient(shares: np.ndarray, cotangent: np.ndarray) -> np.ndarray:
    return shares * (cotangent - (shares * cotangent).sum(-1, keepdims=True))


def exact(
    router: str, renormalize: bool, logits: np.ndarray, ids: np.ndarray, cotangent: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights, probabilities, and the gradient of their product with the cotangent."""
    logits, cotangent = np.float64(logits), np.float64(cotangent)
    for_weights, for_probabilities = np.split(cotangent, [ids.shape[-1]], axis=-1)
    chosen = np.eye(logits.shape[-1])[ids]  # [T, K, E]
    logs, slopes = logits, np.ones_like(logits)
    if router == "sigmoid":
        for_weights = for_weights * SCALE
        logs, slopes = -np.logaddexp(0, -logits), np.exp(-np.logaddexp(0, logits))
    probabilities = quotients(logs)
    chosen_logs = np.take_along_axis(logs, ids, -1)
    if renormalize:
        weights = quotients(chosen_logs)
        chosen_gradient = quotients_gradient(weights, for_weights)
    elif router == "sigmoid":
        weights = np.exp(chosen_logs)
        chosen_gradient = weights * for_weights
    else:
        weights = np.take_along_axis(probabilities, ids, -1)
        for_probabilities = for_probabilities + np.einsum("tke,tk->te", chosen, for_weights)
        chosen_gradient = np.zeros_like(weights)
    gradient = quotients_gradient(probabilities, for_probabilities)
    gradient += np.einsum("tke,tk->te", chosen, chosen_gradient)
    return weights * (SCALE if router == "sigmoid" else 1), probabilities, gradient * slopes


@functools.cache
def compiled(router: str, renormalize: bool, top_groups: int) -> Callable[..., tuple]:
    """The routing, and its gradient as in `exact`."""
    options = dict(renormalize=renormalize, num_groups=4, top_groups=top_groups)
    route = functools.partial(routing.softmax_topk, **options)
    if router == "sigmoid":
        route = functools.partial(routing.sigmoid_topk, scale=SCALE, **options)

    def product(logits, bias, mask, cotangent):
        got = route(logits, TOP_K, bias=bias, token_mask=mask)
        both = jnp.concatenate([got.topk_weights, got.probabilities], -1)
        return (both * cotangent).sum(), got

    return jax.jit(jax.grad(product, has_aux=True))


class QuotientTest(parameterized.TestCase):
    @parameterized.parameters(
        ("softmax", True, 4), ("sigmoid", True, 2), ("softmax", False, 2), ("sigmoid", False, 4)
    )
    def test_any_logits(self, router: str, renormalize: bool, top_groups: int):
        @settings()
        @hypothesis.given(LOGITS, BIAS, MASK, COTANGENTS, st.sampled_from(MASKED_LOGITS))
        def check(logits, bias, mask, cotangent, masked_logit):
            logits[np.isneginf(logits).all(-1), 0] = 0  # some expert is left to every token
            logits[~mask] = masked_logit
            gradient, got = compiled(router, renormalize, top_groups)(logits, bias, mask, cotangent)
            for array in (*got[1:], gradient):
                np.testing.assert_array_equal(array[~mask], 0)
            np.testing.assert_array_equal(got.topk_ids[~mask], -1)
            ids = np.asarray(got.topk_ids)[mask]
            weights, probabilities, expected = exact(
                router, renormalize, logits[mask], ids, cotangent[mask]
            )
            close = functools.partial(np.testing.assert_allclose, rtol=1e-5)
            close(got.topk_weights[mask], weights, atol=1e-37)
            close(got.probabilities[mask], probabilities, atol=1e-37)
            close(gradient[mask], expected, atol=4e-6)

        check()

    @parameterized.product(router=["softmax", "sigmoid"], renormalize=[False, True])
    def test_the_oracle_by_differences(self, router: str, renormalize: bool):
        rng = np.random.default_rng(0)
        logits, cotangent = rng.normal(size=SHAPE), rng.normal(size=(NUM_TOKENS, 11))
        ids = np.argsort(-logits, -1)[:, :TOP_K]

        def product(logits):
            both = exact(router, renormalize, logits, ids, cotangent)[:2]
            return (np.concatenate(both, -1) * cotangent).sum()

        steps = 1e-6 * np.eye(logits.size).reshape(-1, *SHAPE)
        differences = [(product(logits + s) - product(logits - s)) / 2e-6 for s in steps]
        gradient = exact(router, renormalize, logits, ids, cotangent)[2]
        np.testing.assert_allclose(gradient.ravel(), differences, atol=1e-8)

    @parameterized.parameters(-50, -200, -1e4, 30, 1e4)
    def test_sigmoids_of_one_size(self, level: float):
        """Their sum underflows, or their differences from 1 do; each weight and its gradient."""
        logits = np.float32(level) - np.arange(NUM_EXPERTS, dtype=np.float32)
        logits = np.tile(logits, (NUM_TOKENS, 1))
        for cotangents in np.split(np.eye(12, TOP_K + NUM_EXPERTS, dtype=np.float32), 2):
            gradient, got = compiled("sigmoid", True, 4)(
                logits, np.zeros(NUM_EXPERTS), np.ones(NUM_TOKENS, bool), cotangents
            )
            *both, expected = exact("sigmoid", True, logits, np.asarray(got.topk_ids), cotangents)
            np.testing.assert_allclose(got.topk_weights, both[0], rtol=1e-5)
            np.testing.assert_allclose(got.probabilities, both[1], rtol=1e-5)
            np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)

    def test_a_bias_against_the_largest_probability(self):
        logits = jnp.asarray([[60.0, 0, 1, 2]])
        got = routing.softmax_topk(logits, 2, bias=jnp.asarray([-10.0, 0, 0, 0]))
        np.testing.assert_array_equal(got.topk_ids, [[3, 2]])
        np.testing.assert_allclose(got.topk_weights, [[0.7310586, 0.2689414]], rtol=1e-6)


class LossTest(parameterized.TestCase):
    @settings()
    @hypothesis.given(LOGITS, MASK, st.sampled_from(MASKED_LOGITS))
    def test_z_loss(self, logits, mask, masked_logit):
        logits = np.where(np.isneginf(logits), logits, np.clip(logits, -1e15, 1e15))
        logits[np.isneginf(logits).all(-1), 0] = 0
        logits[~mask] = masked_logit
        loss, gradient = z_loss(logits, mask)
        kept = np.float64(logits[mask])
        log_sums = np.logaddexp.reduce(kept, -1)
        num_tokens = max(1, mask.sum())
        np.testing.assert_allclose(loss, (log_sums**2).sum() / num_tokens, rtol=1e-5, atol=1e-6)
        expected = 2 * log_sums[:, None] * quotients(kept) / num_tokens
        np.testing.assert_array_equal(gradient[~mask], 0)
        np.testing.assert_allclose(gradient[mask], expected, rtol=2e-5, atol=1e-5)

    @parameterized.parameters("softmax", "sigmoid")
    def test_balancing_loss(self, router: str):
        """One token of any logits, among others."""
        route = {"softmax": routing.softmax_topk, "sigmoid": routing.sigmoid_topk}[router]

        @jax.jit
        @jax.value_and_grad
        def balancing_loss(logits, ids):
            return routing.balancing_loss(route(logits, TOP_K).probabilities, ids)

        @settings(max_examples=30)
        @hypothesis.given(LOGITS)
        def check(logits):
            logits[np.isneginf(logits).all(-1), 0] = 0
            ids = np.asarray(route(jnp.asarray(logits), TOP_K).topk_ids)
            loss, gradient = balancing_loss(logits, ids)
            fractions = np.bincount(ids.ravel(), minlength=NUM_EXPERTS) / ids.size
            for_probabilities = np.tile(NUM_EXPERTS / NUM_TOKENS * fractions, (NUM_TOKENS, 1))
            cotangent = np.concatenate([np.zeros(ids.shape), for_probabilities], -1)
            _, probabilities, expected = exact(router, True, logits, ids, cotangent)
            np.testing.assert_allclose(loss, (probabilities * for_probabilities).sum(), rtol=1e-5)
            np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=4e-6)

        check()


@jax.jit
def z_loss(logits: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.value_and_grad(lambda x: routing.z_loss(x, token_mask=mask))(logits)


if __name__ == "__main__":
    absltest.main()
