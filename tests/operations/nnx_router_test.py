"""nnx.MoE calls its router each time: state, pytrees, biases, and their gradients."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx

from jax_ep import routing
from jax_ep.nnx import MoE, SelectionBias

HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K, NUM_TOKENS = 16, 8, 8, 2, 64
ONE_DEVICE = testing.mesh_of((1,), ("expert",))
MESHES = {
    "one_device": ONE_DEVICE,
    "expert": testing.expert_mesh(),
}


def make_layer(mesh: Any = ONE_DEVICE, **options: Any) -> MoE:
    return MoE(HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K, mesh=mesh, rngs=nnx.Rngs(0), **options)


def tokens() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (NUM_TOKENS, HIDDEN))


def towards(*experts: int) -> np.ndarray:
    """A bias that routes every token to these experts."""
    bias = np.zeros(NUM_EXPERTS, np.float32)
    bias[list(experts)] = 100
    return bias


def only(*experts: int) -> np.ndarray:
    """The load when every token goes to these experts."""
    load = np.zeros(NUM_EXPERTS, np.int32)
    load[list(experts)] = NUM_TOKENS
    return load


class IdsTest(parameterized.TestCase):
    @parameterized.parameters("expert", None)
    def test_no_expert_has_an_id_past_the_last(self, expert_axis: str | None):
        """Also where every rank has all experts, and addresses its own."""

        def router(logits: jax.Array, top_k: int) -> routing.Routing:
            routed = routing.softmax_topk(logits, top_k)
            return routed._replace(topk_ids=routed.topk_ids + NUM_EXPERTS)

        options = {} if expert_axis else {"expert_axis": None, "batch_axes": ("expert",)}
        layer = make_layer(testing.expert_mesh(), router=router, **options)
        y, stats = layer(tokens())
        self.assertFalse(np.asarray(y).any())
        self.assertFalse(np.asarray(stats.expert_load).any())


class BiasedRouter(nnx.Module):
    """An nnx module with a variable that is state, and a param that is trained."""

    def __init__(self):
        self.bias = nnx.BatchStat(jnp.zeros(NUM_EXPERTS))
        self.temperature = nnx.Param(jnp.ones(()))

    def __call__(self, logits: jax.Array, top_k: int) -> routing.Routing:
        return routing.softmax_topk(logits * self.temperature[...], top_k, bias=self.bias[...])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class PytreeRouter:
    """A plain pytree with a static member."""

    bias: jax.Array
    scale: float = dataclasses.field(metadata={"static": True}, default=2.0)

    def __call__(self, logits: jax.Array, top_k: int) -> routing.Routing:
        return routing.sigmoid_topk(logits, top_k, bias=self.bias, scale=self.scale)


class StateTest(parameterized.TestCase):
    @parameterized.parameters(*MESHES)
    def test_a_function_that_closes_over_state(self, mesh: str):
        """Called eagerly, so that what it reads is what it reads now."""
        state = {"bias": towards(0, 1)}
        layer = make_layer(
            MESHES[mesh], router=lambda g, k: routing.softmax_topk(g, k, bias=state["bias"])
        )
        for experts in (0, 1), (2, 3), (4, 7):
            state["bias"] = towards(*experts)
            np.testing.assert_array_equal(layer(tokens())[1].expert_load, only(*experts))

    @parameterized.parameters(
        lambda g, k: routing.sigmoid_topk(g, k), functools.partial(routing.sigmoid_topk, scale=1.0)
    )
    def test_a_function_in_a_jitted_module(self, router: Any):
        """It is static: nnx.jit takes no argument that is neither an array nor static."""
        call = nnx.jit(lambda layer, x: layer(x))
        got, expected = (call(make_layer(router=r), tokens()) for r in (router, "sigmoid"))
        jax.tree.map(np.testing.assert_array_equal, got, expected)

    @parameterized.product(mesh=list(MESHES), jitted=[False, True])
    def test_a_module_with_a_variable(self, mesh: str, jitted: bool):
        """A moving bias routes the next call, and its values do not make nnx.jit trace again."""
        layer, traces = make_layer(MESHES[mesh], router=BiasedRouter()), []

        def run(layer: MoE, x: jax.Array) -> Any:
            traces.append(None)
            return layer(x)

        call = nnx.jit(run) if jitted else run
        for experts in (0, 1), (2, 3), (4, 7), (1, 6), (0, 5):
            layer.router.bias[...] = jnp.asarray(towards(*experts))
            np.testing.assert_array_equal(call(layer, tokens())[1].expert_load, only(*experts))
        # nnx.jit traces a second time for the shardings that its first call gave the state.
        self.assertLen(traces, 2 if jitted else 5)

    @parameterized.parameters(*MESHES)
    def test_a_pytree(self, mesh: str):
        got = make_layer(MESHES[mesh], router=PytreeRouter(jnp.asarray(towards(5, 6))))(tokens())
        np.testing.assert_array_equal(got[1].expert_load, only(5, 6))

    @parameterized.parameters(*MESHES)
    def test_parameters_of_a_router_are_trained(self, mesh: str):
        def loss(layer: MoE) -> jax.Array:
            y, stats = layer(tokens())
            return (y**2).sum() + stats.aux_loss

        layer = make_layer(MESHES[mesh], router=BiasedRouter())
        got = nnx.jit(nnx.grad(loss))(layer).router.temperature[...]

        def with_temperature(temperature: jax.Array) -> jax.Array:
            layer = make_layer(router=lambda g, k: routing.softmax_topk(g * temperature, k))
            return loss(layer)

        expected = jax.grad(with_temperature)(jnp.ones(()))
        self.assertGreater(abs(float(expected)), 1e-4)
        np.testing.assert_allclose(got, expected, rtol=1e-4)


class BiasTest(parameterized.TestCase):
    @parameterized.product(mesh=list(MESHES), router=["softmax", "sigmoid"])
    def test_selection_bias(self, mesh: str, router: str):
        """It moves the selection, and no weight (DeepSeek-V3)."""
        layer = make_layer(MESHES[mesh], router=router, selection_bias=True)
        same_as_without = make_layer(router=router)(tokens())
        np.testing.assert_allclose(layer(tokens())[0], same_as_without[0], rtol=1e-4, atol=1e-5)
        layer.selection_bias[...] = jnp.asarray(towards(2, 3))
        y, stats = layer(tokens())
        np.testing.assert_array_equal(stats.expert_load, only(2, 3))

        route = {"softmax": routing.softmax_topk, "sigmoid": routing.sigmoid_topk}[router]
        by_hand = make_layer(router=lambda g, k: route(g, k, bias=towards(2, 3)))
        np.testing.assert_allclose(y, by_hand(tokens())[0], rtol=1e-4, atol=1e-5)

    def test_selection_bias_is_not_trained_by_gradients(self):
        layer = make_layer(selection_bias=True)
        self.assertIsInstance(layer.selection_bias, SelectionBias)
        self.assertNotIn("selection_bias", nnx.to_pure_dict(nnx.state(layer, nnx.Param)))
        self.assertEqual(layer.selection_bias[...].dtype, jnp.float32)

    def test_updates_of_the_selection_bias_even_out_the_load(self):
        layer = make_layer(selection_bias=True, router="sigmoid")
        layer.router_kernel[...] = layer.router_kernel[...].at[:, 0].add(0.5)
        x = tokens() + 0.5
        first = layer(x)[1].expert_load
        step = nnx.jit(lambda layer, x: layer(x)[1].expert_load)
        for _ in range(100):
            bias = layer.selection_bias
            bias[...] = routing.updated_bias(bias[...], step(layer, x), rate=1e-2)
        last = step(layer, x)
        self.assertGreater(first.max(), 3 * first.mean())
        self.assertLess(last.max(), 1.5 * last.mean())

    @parameterized.parameters(*MESHES)
    def test_logits_bias(self, mesh: str):
        """It is added to the logits, and trained (gpt-oss)."""
        layer = make_layer(MESHES[mesh], logits_bias=True)
        self.assertIsInstance(layer.logits_bias, nnx.Param)
        values = jax.random.normal(jax.random.key(2), (NUM_EXPERTS,))
        layer.logits_bias[...] = values

        def loss(layer: MoE) -> jax.Array:
            return (layer(tokens())[0] ** 2).sum()

        value, grads = nnx.jit(nnx.value_and_grad(loss))(layer)

        def by_hand(bias: jax.Array) -> jax.Array:
            return loss(make_layer(router=lambda g, k: routing.softmax_topk(g + bias, k)))

        expected, bias_grad = jax.value_and_grad(by_hand)(values)
        np.testing.assert_allclose(value, expected, rtol=1e-4)
        np.testing.assert_allclose(grads.logits_bias[...], bias_grad, rtol=1e-3, atol=1e-4)


if __name__ == "__main__":
    absltest.main()
