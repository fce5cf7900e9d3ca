"""Routers that draw random numbers: other ones on each rank, and in each call."""

from __future__ import annotations

import functools
from typing import Any

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import linen as nn
from flax import nnx

import jax_ep.linen
import jax_ep.nnx
from jax_ep import routing

SIZES = 16, 8, 8, 2
NUM_TOKENS = 64  # equal ones, so that they differ by their noise alone
RANKS = 2


def tokens() -> jax.Array:
    return jnp.ones((NUM_TOKENS, SIZES[0]))


def noisy(logits: jax.Array, top_k: int, *, key: Any, scale: Any = 1.0) -> routing.Routing:
    return routing.softmax_topk(logits + scale * jax.random.normal(key, logits.shape), top_k)


def by_token(logits: jax.Array, top_k: int, *, key: Any, token_indices: Any) -> routing.Routing:
    """Draws for each token by its own key."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, token_indices)
    noise = jax.vmap(lambda key: jax.random.normal(key, logits.shape[1:]))(keys)
    return routing.softmax_topk(logits + noise, top_k)


class WithRngs(nnx.Module):
    def __init__(self) -> None:
        self.rngs = nnx.Rngs(router=1)
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, logits: jax.Array, top_k: int) -> routing.Routing:
        return noisy(logits, top_k, key=self.rngs.router(), scale=self.scale[...])


class WithKey(nnx.Module):
    def __init__(self, key: Any) -> None:
        self.key = nnx.Variable(key)

    def __call__(self, logits: jax.Array, top_k: int) -> routing.Routing:
        return noisy(logits, top_k, key=self.key[...])


class WithMakeRng(nn.Module):
    @nn.compact
    def __call__(self, logits: jax.Array, top_k: int) -> routing.Routing:
        return noisy(logits, top_k, key=self.make_rng("router"))


ROUTERS = {
    "rngs": WithRngs,
    "key": lambda: WithKey(jax.random.key(3)),
    "old key": lambda: WithKey(jax.random.PRNGKey(3)),
    "partial": lambda: functools.partial(noisy, key=jax.random.key(3)),
}


def make_layer(router: Any, num_ranks: int = RANKS, **options: Any) -> jax_ep.nnx.MoE:
    mesh = testing.expert_mesh(num_ranks)
    return jax_ep.nnx.MoE(*SIZES, mesh=mesh, rngs=nnx.Rngs(0), router=router, **options)


def y_of(layer: Any, x: jax.Array) -> jax.Array:
    return layer(x)[0]


class NnxTest(parameterized.TestCase):
    @parameterized.product(router=list(ROUTERS), jitted=[False, True])
    def test_ranks_draw_other_numbers(self, router: str, jitted: bool):
        run = nnx.jit(y_of) if jitted else y_of
        y = np.asarray(run(make_layer(ROUTERS[router]()), tokens()))
        first, second = np.split(y, RANKS)
        self.assertGreater((first != second).any(1).mean(), 0.5)
        again = run(make_layer(ROUTERS[router]()), tokens())
        np.testing.assert_array_equal(y, again)

    @parameterized.parameters(False, True)
    def test_a_stream_advances_with_each_call(self, jitted: bool):
        run = nnx.jit(y_of) if jitted else y_of
        layer = make_layer(WithRngs())
        first, second = (np.asarray(run(layer, tokens())) for _ in range(2))
        self.assertGreater((first != second).any(1).mean(), 0.5)
        self.assertEqual(int(layer.router.rngs.router.count[...]), 2)

    @parameterized.parameters(False, True)
    def test_gradients(self, jitted: bool):
        layer = make_layer(WithRngs())
        run = nnx.grad(lambda layer, x: (layer(x)[0] ** 2).sum())
        grads = (nnx.jit(run) if jitted else run)(layer, tokens())
        self.assertGreater(abs(float(grads.router.scale[...])), 1e-6)
        self.assertEqual(int(layer.router.rngs.router.count[...]), 1)

    def test_a_tensor_axis_has_the_same_tokens(self):
        mesh = testing.mesh_of((2, 2), ("expert", "tensor"))
        layer = jax_ep.nnx.MoE(
            *SIZES, mesh=mesh, tensor_axis="tensor", rngs=nnx.Rngs(0), router=WithRngs()
        )
        np.testing.assert_allclose(
            layer(tokens())[0], make_layer(WithRngs())(tokens())[0], rtol=1e-5, atol=1e-6
        )

    def test_keys_of_tokens_do_not_depend_on_the_mesh(self):
        router = functools.partial(by_token, key=jax.random.key(3))
        x = jax.random.normal(jax.random.key(1), (6, 5, SIZES[0]))  # padded on four ranks
        expected = make_layer(router, 1)(x)[0]
        for num_ranks in 2, 4:
            layer = make_layer(router, num_ranks, sequence_axes=())
            np.testing.assert_allclose(layer(x)[0], expected, rtol=1e-4, atol=1e-5)
        mesh = testing.mesh_of((2, 4), ("data", "expert"))
        layer = jax_ep.nnx.MoE(
            *SIZES, mesh=mesh, sequence_axes=("expert",), rngs=nnx.Rngs(0), router=router
        )
        x = jax.random.normal(jax.random.key(1), (4, 8, SIZES[0]))
        expected = make_layer(router, 1)(x)[0]
        np.testing.assert_allclose(layer(x)[0], expected, rtol=1e-4, atol=1e-5)

    def test_other_state_may_not_change(self):
        class Counting(WithRngs):
            def __call__(self, logits: jax.Array, top_k: int) -> routing.Routing:
                self.scale[...] = self.scale[...] + 1
                return super().__call__(logits, top_k)

        with self.assertRaisesRegex(ValueError, "Counting changed its own state"):
            make_layer(Counting())(tokens())


class LinenTest(parameterized.TestCase):
    @parameterized.product(jitted=[False, True], make_key=[jax.random.key, jax.random.PRNGKey])
    def test_ranks_draw_other_numbers(self, jitted: bool, make_key: Any):
        module = jax_ep.linen.MoE(*SIZES, mesh=testing.expert_mesh(RANKS), router=WithMakeRng())
        keys = {"params": make_key(0), "router": make_key(1)}
        variables = module.init(keys, tokens())

        def run(variables: Any, key: jax.Array) -> jax.Array:
            return module.apply(variables, tokens(), rngs={"router": key})[0]

        run = jax.jit(run) if jitted else run
        y = np.asarray(run(variables, make_key(1)))
        first, second = np.split(y, RANKS)
        self.assertGreater((first != second).any(1).mean(), 0.5)
        np.testing.assert_array_equal(run(variables, make_key(1)), y)
        self.assertGreater((np.asarray(run(variables, make_key(2))) != y).any(1).mean(), 0.5)
        gradients = jax.grad(lambda v: (run(v, make_key(1)) ** 2).sum())(variables)
        for leaf in jax.tree.leaves(gradients):
            self.assertTrue(np.isfinite(leaf).all())


if __name__ == "__main__":
    absltest.main()
