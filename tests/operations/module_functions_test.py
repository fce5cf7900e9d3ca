"""Functions as options of modules: eager calls compile once, and read what the functions read now."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import testing  # isort: skip

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_ep.linen
import jax_ep.nnx
from jax_ep import routing

SIZES = 16, 8, 8, 2
STATE: dict[str, Any] = {}
compiled: list[str] = []


def record(event: str, duration: float, **_: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        compiled.append(event)


jax.monitoring.register_event_duration_secs_listener(record)


def clipped(gate: jax.Array, up: jax.Array) -> jax.Array:
    """As gpt-oss has it. `jax.nn.relu` has a derivative rule of its own."""
    gate, up = jnp.minimum(gate, 7), jnp.clip(up, -7, 7)
    return jax.nn.relu(gate) * jax.nn.sigmoid(1.702 * gate) * (up + 1)


def scaled(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up * STATE["scale"]


def matmuls(rows: jax.Array, group_sizes: jax.Array, w_up: Any, w_down: Any) -> jax.Array:
    up = jax_ep.grouped_matmul(rows, w_up[:, :, 0], group_sizes)
    return STATE["scale"] * jax_ep.grouped_matmul(jax.nn.relu(up), w_down, group_sizes)


def scaled_router(logits: jax.Array, top_k: int) -> routing.Routing:
    return routing.softmax_topk(logits * STATE["scale"], top_k, renormalize=False)


# The partial is OLMoE's.
OPTIONS: dict[str, dict[str, Any]] = {
    "activation": {"activation": clipped, "num_chunks": 2, "shared_intermediate_size": 8},
    "partial": {"router": functools.partial(routing.softmax_topk, renormalize=False)},
    "scaled activation": {"activation": scaled, "remat": None},
    "scaled router": {"router": scaled_router},
    "experts_fn": {"experts_fn": matmuls},
}


def tokens() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (32, SIZES[0]))


def loss_of(layer: Any, x: jax.Array) -> jax.Array:
    y, stats = layer(x)
    return (y**2).sum() + stats.aux_loss


class CompiledOnceTest(parameterized.TestCase):
    def assert_compiles_nothing(self, call: Callable[[], Any]) -> None:
        jax.block_until_ready(call())
        before = len(compiled)
        for _ in range(2):
            jax.block_until_ready(call())
        self.assertEqual(len(compiled) - before, 0)
        self.assertGreater(before, 0)

    @parameterized.product(options=list(OPTIONS), gradient=[False, True])
    def test_nnx(self, options: str, gradient: bool):
        STATE["scale"] = 2.0
        layer = jax_ep.nnx.MoE(
            *SIZES, mesh=testing.expert_mesh(2), rngs=nnx.Rngs(0), **OPTIONS[options]
        )
        run = nnx.grad(loss_of) if gradient else loss_of
        x = tokens()
        self.assert_compiles_nothing(lambda: run(layer, x))

    def test_linen(self):
        mesh = testing.expert_mesh(2)
        layer = jax_ep.linen.MoE(*SIZES, mesh=mesh, **OPTIONS["activation"])
        x = tokens()
        variables = layer.init(jax.random.key(0), x)
        self.assert_compiles_nothing(lambda: layer.apply(variables, x))

    def test_layers_whose_functions_compute_the_same(self):
        """Each call makes functions of its own."""
        mesh, x = testing.expert_mesh(2), tokens()

        def call() -> Any:
            layer = jax_ep.nnx.MoE(
                *SIZES, mesh=mesh, rngs=nnx.Rngs(0), activation=lambda up: jnp.tanh(up) ** 3
            )
            return layer(x)

        self.assert_compiles_nothing(call)


class StateTest(parameterized.TestCase):
    @parameterized.product(
        options=["scaled activation", "scaled router", "experts_fn"], is_array=[False, True]
    )
    def test_a_changed_state_changes_results(self, options: str, is_array: bool):
        """A number is part of the program; an array is an operand, and compiles nothing."""
        layer = jax_ep.nnx.MoE(
            *SIZES, mesh=testing.expert_mesh(2), rngs=nnx.Rngs(0), **OPTIONS[options]
        )
        x = tokens()
        for scale in 1.0, 2.0, 0.5:
            STATE["scale"] = jnp.float32(scale) if is_array else scale
            before = len(compiled)
            got = layer(x)[0]
            if is_array and scale != 1:
                self.assertEqual(len(compiled), before)
            expected = nnx.jit(lambda layer, x: layer(x)[0])(layer, x)
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)

    @parameterized.parameters("scaled activation", "scaled router", "experts_fn")
    def test_gradients_of_what_a_function_closes_over(self, options: str):
        layer = jax_ep.nnx.MoE(
            *SIZES, mesh=testing.expert_mesh(2), rngs=nnx.Rngs(0), **OPTIONS[options]
        )
        x = tokens()

        def loss(scale: jax.Array) -> jax.Array:
            STATE["scale"] = scale
            return loss_of(layer, x)

        got, expected = jax.grad(loss)(1.5), jax.jit(jax.grad(loss))(1.5)
        self.assertGreater(abs(float(expected)), 1e-4)
        np.testing.assert_allclose(got, expected, rtol=1e-4)

    def test_a_derivative_rule_that_reads_state(self):
        """A trace does not show the rule; its derivative does."""

        @jax.custom_jvp
        def activation(up: jax.Array) -> jax.Array:
            return up * 2

        @activation.defjvp
        def _(primals: Any, tangents: Any) -> Any:
            return activation(*primals), tangents[0] * STATE["scale"]

        layer = jax_ep.nnx.MoE(
            *SIZES,
            mesh=testing.expert_mesh(1),
            rngs=nnx.Rngs(0),
            activation=lambda u: activation(u),
        )
        x = tokens()
        found = []
        for scale in 1.0, 3.0:
            STATE["scale"] = scale
            found.append(nnx.grad(loss_of)(layer, x).w_up[...])
        np.testing.assert_allclose(found[1], 3 * found[0], rtol=1e-4, atol=1e-5)

    def test_a_router_is_called_once_per_call(self):
        calls = []

        def router(logits: jax.Array, top_k: int) -> routing.Routing:
            calls.append(logits.shape)
            return routing.softmax_topk(logits, top_k)

        mesh, x = testing.expert_mesh(2), tokens()
        layer = jax_ep.nnx.MoE(*SIZES, mesh=mesh, rngs=nnx.Rngs(0), router=router)
        for count in 1, 2, 3:
            layer(x)
            self.assertEqual(calls, [(16, 8)] * count)


def sharpened(gate: jax.Array, up: jax.Array, *, sharpness: jax.Array) -> jax.Array:
    return jax.nn.sigmoid(gate * sharpness) * gate * up


def scaled_matmuls(
    rows: jax.Array, group_sizes: jax.Array, w_up: Any, w_down: Any, *, sharpness: jax.Array
) -> jax.Array:
    h = jax_ep.grouped_matmul(rows, w_up.reshape(*w_up.shape[:2], -1), group_sizes)
    gate, up = jnp.split(h, 2, axis=-1)
    return jax_ep.grouped_matmul(sharpened(gate, up, sharpness=sharpness), w_down, group_sizes)


def dense(params: Any, sharpness: jax.Array, x: jax.Array) -> jax.Array:
    ids, weights, _ = routing.softmax_topk(x @ params["router_kernel"], SIZES[3])
    h = jnp.einsum("th,ehcf->tecf", x, params["w_up"])
    h = sharpened(h[:, :, 0], h[:, :, 1], sharpness=sharpness)
    y = jnp.einsum("tef,efh->teh", h, params["w_down"])
    hits = (ids[..., None] == jnp.arange(SIZES[2])).astype(x.dtype)
    return jnp.einsum("tke,tk,teh->th", hits, weights, y)


class HeldArraysTest(parameterized.TestCase):
    """A partial's arrays are arguments of the layer's `shard_map`, which closes over none."""

    @parameterized.product(
        option=["activation", "experts_fn"], kind=[AxisType.Auto, AxisType.Explicit]
    )
    def test_values_and_gradients(self, option: str, kind: AxisType):
        function = {"activation": sharpened, "experts_fn": scaled_matmuls}[option]
        params = nnx.to_pure_dict(
            nnx.state(jax_ep.nnx.MoE(*SIZES, mesh=testing.expert_mesh(1), rngs=nnx.Rngs(0)))
        )
        given = jnp.linspace(0.5, 2, SIZES[1]), tokens()

        def expected(given: Any) -> jax.Array:
            return jnp.sin(dense(params, *given)).sum()

        def loss(given: Any) -> jax.Array:
            sharpness, x = given
            held = functools.partial(function, sharpness=sharpness)
            layer = jax_ep.linen.MoE(*SIZES, **{option: held})
            return jnp.sin(layer.apply({"params": params}, x)[0]).sum()

        want = jax.value_and_grad(expected)(given)
        mesh = testing.mesh_of(testing.fit((2, 4)), ("data", "expert"), axis_type=kind)
        with jax.set_mesh(mesh):
            params, given = jax.device_put((params, given), P())
            for run in jax.value_and_grad(loss), jax.jit(jax.value_and_grad(loss)):
                jax.tree.map(
                    lambda a, b: np.testing.assert_allclose(a, b, rtol=5e-5, atol=5e-5),
                    *jax.tree.map(np.asarray, (run(given), want)),
                )

    def test_other_values_compile_nothing(self):
        mesh, x = testing.expert_mesh(2), tokens()

        def call(sharpness: float) -> jax.Array:
            held = functools.partial(sharpened, sharpness=jnp.full(SIZES[1], sharpness))
            layer = jax_ep.nnx.MoE(*SIZES, mesh=mesh, rngs=nnx.Rngs(0), activation=held)
            return jax.block_until_ready(layer(x)[0])

        first, before = call(1.0), len(compiled)
        second = call(2.0)
        self.assertEqual(len(compiled), before)
        self.assertGreater(jnp.abs(first - second).max(), 1e-3)


if __name__ == "__main__":
    absltest.main()
