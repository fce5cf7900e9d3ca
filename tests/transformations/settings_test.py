"""JAX's settings that look for mistakes: rank promotion, leaked tracers, NaN; and pickled modules."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any
from unittest import mock

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx
from jax.sharding import PartitionSpec as P

import jax_ep
import jax_ep.linen
import jax_ep.nnx
from jax_ep import quant, routing

SIZES = 16, 8, 8, 2
MESH = testing.expert_mesh(2)
IDS = np.random.default_rng(0).integers(0, 8, (32, 2)).astype(np.int32)


def tokens() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (32, SIZES[0]))


def matrices() -> tuple[jax.Array, jax.Array]:
    return jnp.ones((8, 16, 2, 8)) / 9, jnp.ones((8, 8, 16)) / 9


def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def layer(remat: Any = "dispatch", activation: Any = "swiglu") -> Any:
    """Returns moe_mlp of x, w_up and w_down on two ranks."""

    def run(x: jax.Array, ids: jax.Array, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
        weights = jnp.ones(ids.shape)
        options: dict[str, Any] = {"remat": remat, "activation": activation}
        return jax_ep.moe_mlp(x, ids, weights, w_up, w_down, axis_name="expert", **options)[0]

    sharded = jax.shard_map(run, mesh=MESH, in_specs=P("expert"), out_specs=P("expert"))
    return lambda x, *matrices: sharded(x, IDS, *matrices)


REMAT = {"none": None, "dispatch": "dispatch", "experts": "experts"}


class NanTest(parameterized.TestCase):
    @parameterized.product(remat=list(REMAT), activation=["swiglu", gated])
    def test_moe_mlp(self, remat: str, activation: Any):
        run = layer(REMAT[remat], activation)
        loss = lambda *arguments: (run(*arguments) ** 2).sum()
        gradients = jax.grad(loss, (0, 1, 2))
        with jax.debug_nans(True), jax.debug_infs(True):
            jax.block_until_ready(run(tokens(), *matrices()))
            jax.block_until_ready(gradients(tokens(), *matrices()))
            jax.block_until_ready(jax.jit(gradients)(tokens(), *matrices()))

    @parameterized.parameters(False, True)
    def test_the_operation_that_makes_it_is_named(self, jitted: bool):
        run = layer()
        loss = lambda *arguments: jnp.log(-1 - jnp.abs(run(*arguments))).sum()
        with jax.debug_nans(True):
            for f in loss, jax.value_and_grad(loss):
                f = jax.jit(f) if jitted else f
                with self.assertRaisesRegex(FloatingPointError, "in log"):
                    f(tokens(), *matrices())

    @parameterized.parameters(*REMAT)
    def test_modules(self, remat: str):
        module = jax_ep.nnx.MoE(*SIZES, mesh=MESH, rngs=nnx.Rngs(0), remat=REMAT[remat])
        loss = lambda module, x: (module(x)[0] ** 2).sum()
        with jax.debug_nans(True), jax.debug_infs(True):
            jax.block_until_ready(loss(module, tokens()))
            jax.block_until_ready(nnx.grad(loss)(module, tokens()))

    def test_operations_without_zeros_in_the_tail(self):
        x, sizes = tokens(), jnp.array([3, 4], jnp.int32)
        up, down = (matrix[:2] for matrix in matrices())

        def send(x: jax.Array) -> jax.Array:
            dispatch = functools.partial(jax_ep.dispatch, num_experts=8, axis_name="expert")
            return dispatch(x, jnp.zeros((16, 1), jnp.int32), None, zero_tail=False).rows

        calls = (
            lambda x: jax_ep.grouped_matmul(x, up[:, :, 0], sizes, zero_tail=False),
            lambda x: jax_ep.grouped_mlp(x, up, down, sizes, zero_tail=False),
            jax.shard_map(send, mesh=MESH, in_specs=P("expert"), out_specs=P("expert")),
        )
        for call in calls:
            with jax.debug_nans(True):
                jax.block_until_ready(call(x))
                jax.block_until_ready(jax.grad(lambda x, c=call: c(x)[:7].sum())(x))
            self.assertTrue(np.isnan(call(x)).any() or jax.default_backend() != "cpu")


class RankPromotionTest(parameterized.TestCase):
    @parameterized.product(remat=list(REMAT), activation=["swiglu", gated])
    def test_moe_mlp(self, remat: str, activation: Any):
        loss = lambda *a: (layer(REMAT[remat], activation)(*a) ** 2).sum()
        with jax.numpy_rank_promotion("raise"):
            jax.block_until_ready(jax.jit(jax.grad(loss, (0, 1, 2)))(tokens(), *matrices()))

    def test_quantized(self):
        def loss(x: jax.Array, matrix: jax.Array) -> jax.Array:
            sizes = jnp.array([32, 0], jnp.int32)
            return jax_ep.grouped_matmul(x, matrix, sizes, quantization=quant.Recipe()).sum()

        x, matrix = jnp.ones((32, 128), jnp.bfloat16), jnp.ones((2, 128, 128), jnp.bfloat16)
        with jax.numpy_rank_promotion("raise"):
            jax.block_until_ready(jax.grad(loss, (0, 1))(x, matrix))
            jax.block_until_ready(quant.quantize(x, quant.Fp8Row()).values)


class LeakTest(parameterized.TestCase):
    def test_modules(self):
        router = functools.partial(routing.softmax_topk, renormalize=False)
        module = jax_ep.nnx.MoE(
            *SIZES, mesh=MESH, rngs=nnx.Rngs(0), activation=gated, router=router
        )
        with jax.checking_leaks():
            jax.block_until_ready(module(tokens())[0])
            jax.block_until_ready(nnx.jit(lambda module, x: module(x)[0])(module, tokens()))

    @parameterized.parameters("swiglu", gated)
    def test_gradients(self, activation: Any):
        loss = lambda *arguments: (layer(activation=activation)(*arguments) ** 2).sum()
        with jax.checking_leaks():
            jax.block_until_ready(jax.grad(loss, (0, 1, 2))(tokens(), *matrices()))


OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "mesh": {"mesh": MESH},
    "all": {
        "activation": gated, "router": functools.partial(routing.softmax_topk, renormalize=False),
        "selection_bias": True, "use_bias": True, "shared_intermediate_size": 8,
    },
}  # fmt: skip


class PickleTest(parameterized.TestCase):
    COPIES = (lambda module: pickle.loads(pickle.dumps(module)), copy.deepcopy)

    @parameterized.product(options=list(OPTIONS), make=COPIES)
    def test_nnx(self, options: str, make: Any):
        module = jax_ep.nnx.MoE(*SIZES, rngs=nnx.Rngs(0), **OPTIONS[options])
        copied = make(module)
        self.assertEqual(copied.config, module.config)
        jax.tree.map(np.testing.assert_array_equal, nnx.state(copied), nnx.state(module))

    @parameterized.product(options=list(OPTIONS), make=COPIES)
    def test_linen(self, options: str, make: Any):
        module = jax_ep.linen.MoE(*SIZES, **OPTIONS[options])
        copied = make(module)
        self.assertEqual(copied.mesh, module.mesh)
        self.assertEqual(copied.kernel_init, module.kernel_init)

    def test_a_process_without_these_devices(self):
        state = pickle.dumps(jax_ep.linen.MoE(*SIZES, mesh=MESH))
        only = jax.devices()[:0]
        with (
            mock.patch.object(jax, "devices", lambda platform: only),
            self.assertRaisesRegex(ValueError, "has device 0 of .* and there are 0; .*set_mesh"),
        ):
            pickle.loads(state)


if __name__ == "__main__":
    absltest.main()
