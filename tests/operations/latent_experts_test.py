"""Identity experts, and experts of another size than the router's input, against dense algebra."""

from __future__ import annotations

from typing import Any

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx
from jax.sharding import AxisType

import jax_ep.linen
import jax_ep.nnx
from jax_ep import routing
from jax_ep._src.core import errors

HIDDEN, LATENT, INTERMEDIATE, NUM_EXPERTS, NUM_IDENTITY, TOP_K = 16, 12, 8, 6, 3, 4
SIZES = HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K
ON_MESH = {"fsdp_axis": "data", "tensor_axis": "tensor"}
IDENTITY = {"num_identity_experts": NUM_IDENTITY, "logits_bias": True}
SHARED = {"shared_intermediate_size": 4, "shared_gate": True}


def make_mesh(kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return testing.mesh_of(testing.fit((2, 2, 2)), ("data", "expert", "tensor"), axis_type=kind)


def make_layer(**options: Any) -> jax_ep.nnx.MoE:
    init = nnx.initializers.normal(0.5)
    return jax_ep.nnx.MoE(*SIZES, rngs=nnx.Rngs(0), bias_init=init, **options)


def tokens(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (*shape, HIDDEN))


def mlp(x: jax.Array, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
    h = jnp.einsum("th,hcf->tcf", x, w_up)
    return (jax.nn.silu(h[:, 0]) * h[:, 1]) @ w_down


def dense(params: Any, x: jax.Array, options: Any) -> Any:
    """y and the load, by every expert on every token."""
    flat = x.reshape(-1, HIDDEN)
    logits = flat @ params["router_kernel"] + params.get("logits_bias", 0)
    ids, weights, _ = routing.softmax_topk(logits, TOP_K)
    weight = lambda expert: jnp.where(ids == expert, weights, 0).sum(-1, keepdims=True)
    rows = flat @ params["latent_in"] if "latent_in" in params else flat
    y = sum(
        weight(e) * mlp(rows, params["w_up"][e], params["w_down"][e]) for e in range(NUM_EXPERTS)
    )
    if "latent_out" in params:
        y = y @ params["latent_out"]
    if "shared_gate" in params:
        gate = jax.nn.sigmoid(flat @ params["shared_gate"])
        y += gate * mlp(flat, params["shared_w_up"], params["shared_w_down"])
    num_logits = logits.shape[-1]
    y += sum(weight(e) * flat for e in range(NUM_EXPERTS, num_logits))
    return y.reshape(x.shape), routing.load(ids, num_logits)


def pure(tree: Any) -> Any:
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(tree, nnx.Param)))


def assert_close(got: Any, expected: Any) -> None:
    def check(path: Any, a: Any, b: Any) -> None:
        atol = 5e-5 * np.abs(b).max(initial=0.0)
        np.testing.assert_allclose(a, b, 5e-5, atol, err_msg=jax.tree_util.keystr(path))

    jax.tree_util.tree_map_with_path(check, got, jax.tree.map(np.asarray, expected))


class DenseTest(parameterized.TestCase):
    @parameterized.parameters(
        (IDENTITY, AxisType.Auto),
        ({"latent_size": LATENT, **SHARED}, AxisType.Auto),
        ({"latent_size": LATENT, **IDENTITY, **SHARED, "num_chunks": 2}, AxisType.Explicit),
        ({"latent_size": LATENT, **IDENTITY, **SHARED, "local_only": True}, AxisType.Auto),
    )
    def test_nnx(self, options: Any, kind: AxisType):
        """Values, loads and all gradients, sharded over data, FSDP, experts and tensor."""
        x = tokens(4, 3)
        with jax.set_mesh(make_mesh(kind)):
            layer = make_layer(**options, **ON_MESH)

            def loss(layer: Any, x: jax.Array) -> Any:
                y, stats = layer(x)
                return jnp.sin(y).sum(), (y, stats)

            run = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True))
            (_, (y, stats)), (gradients, x_gradient) = run(layer, x)
        params = pure(layer)

        def expected(params: Any, x: jax.Array) -> Any:
            y, load = dense(params, x, options)
            return jnp.sin(y).sum(), (y, load)

        run = jax.jit(jax.value_and_grad(expected, argnums=(0, 1), has_aux=True))
        (_, (want, load)), (want_gradients, want_x_gradient) = run(params, x)
        np.testing.assert_array_equal(stats.expert_load, load)
        assert_close(np.asarray(y), want)
        assert_close(pure(gradients), want_gradients)
        assert_close(np.asarray(x_gradient), want_x_gradient)
        rows = LATENT if "latent_size" in options else HIDDEN
        self.assertEqual(layer.w_up.shape, (NUM_EXPERTS, rows, 2, INTERMEDIATE))
        if IDENTITY.items() <= options.items():
            self.assertGreater(load[NUM_EXPERTS:].sum(), 0)

    def test_linen(self):
        options = {"latent_size": LATENT, **IDENTITY, **SHARED, "selection_bias": True}
        x, mask = tokens(5), jnp.arange(5) != 2
        with jax.set_mesh(make_mesh()):
            layer = make_layer(**options)
            module = jax_ep.linen.MoE(*SIZES, **options)
            made = module.init(jax.random.key(0), x)
            bias = made["selection_bias"]["selection_bias"]
            self.assertEqual(bias.shape, (NUM_EXPERTS + NUM_IDENTITY,))
            variables = made | {"params": nnx.to_pure_dict(nnx.state(layer, nnx.Param))}
            got = module.apply(variables, x, token_mask=mask)
            jax.tree.map(testing.assert_bitwise, got, layer(x, token_mask=mask))
        self.assertFalse(got[0][2].any())

    def test_experts_that_do_not_divide(self):
        """Six experts on four ranks, and ids of identity experts past those of the padding."""
        mesh = testing.mesh_of(testing.fit((4,)), ("expert",))
        x = tokens(8)
        with jax.set_mesh(mesh):
            layer = make_layer(**IDENTITY)
            y, stats = layer(x)
        want, load = dense(pure(layer), x, IDENTITY)
        assert_close(np.asarray(y), want)
        np.testing.assert_array_equal(stats.expert_load, load)

    def test_more_assignments_than_experts(self):
        """Identity experts count among those that a token may have."""
        with jax.set_mesh(make_mesh()):
            layer = jax_ep.nnx.MoE(
                HIDDEN, INTERMEDIATE, 2, 4, num_identity_experts=2, rngs=nnx.Rngs(0)
            )
            self.assertEqual(layer(tokens(8))[1].expert_load.tolist(), [8] * 4)
            with self.assertRaisesRegex(errors.ArgumentError, "top_k=5 with 4 experts"):
                jax_ep.nnx.MoE(HIDDEN, 8, 2, 5, num_identity_experts=2, rngs=nnx.Rngs(0))
            with self.assertRaisesRegex(errors.ArgumentError, "latent_size=13 does not divide"):
                make_layer(latent_size=13, **ON_MESH)


if __name__ == "__main__":
    absltest.main()
