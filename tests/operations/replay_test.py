"""Expert ids in the statistics, and calls that route by them: values, gradients, meshes, modules."""

from __future__ import annotations

import functools
from typing import Any

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_ep.linen
import jax_ep.nnx
from jax_ep import routing
from jax_ep._src.core import errors

HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K = 16, 8, 8, 3
SIZES = HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K
NAMES = ("data", "expert")


def make_mesh(kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return testing.mesh_of(testing.fit((2, 4)), NAMES, axis_type=kind)


def make_layer(seed: int = 0, **options: Any) -> jax_ep.nnx.MoE:
    return jax_ep.nnx.MoE(*SIZES, rngs=nnx.Rngs(seed), record_ids=True, **options)


def tokens(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (*shape, HIDDEN))


def weights_of(logits: jax.Array, ids: jax.Array, *, sigmoid: bool, renormalize: bool) -> jax.Array:
    """The weights of given experts; ids of -1 have none."""
    scores = 1 / (1 + jnp.exp(-logits)) if sigmoid else jax.nn.softmax(logits)
    weights = jnp.where(ids >= 0, jnp.take_along_axis(scores, jnp.maximum(ids, 0), -1), 0)
    return weights / weights.sum(-1, keepdims=True) if renormalize else weights


def dense(layer: jax_ep.nnx.MoE, x: jax.Array, ids: jax.Array) -> jax.Array:
    """Every expert on every token, weighted by a softmax over the given ones."""
    logits = x @ layer.router_kernel[...]
    weights = weights_of(logits, ids, sigmoid=False, renormalize=True)
    h = jnp.einsum("...h,ehcf->...ecf", x, layer.w_up[...])
    y = jnp.einsum("...ef,efh->...eh", jax.nn.silu(h[..., 0, :]) * h[..., 1, :], layer.w_down[...])
    hits = ids[..., None] == jnp.arange(NUM_EXPERTS)
    return jnp.einsum("...k,...ke,...eh->...h", weights, hits.astype(x.dtype), y)


def assert_close(got: Any, expected: Any) -> None:
    def check(path: Any, a: Any, b: Any) -> None:
        atol = 5e-5 * np.abs(b).max(initial=0.0)
        np.testing.assert_allclose(a, b, 5e-5, atol, err_msg=jax.tree_util.keystr(path))

    jax.tree_util.tree_map_with_path(check, got, jax.tree.map(np.asarray, expected))


class RoutersTest(parameterized.TestCase):
    @parameterized.product(
        router=[routing.softmax_topk, routing.sigmoid_topk], renormalize=[False, True]
    )
    def test_weights_of_given_experts(self, router: Any, renormalize: bool):
        """Also experts that the logits would not select; some ids of -1."""
        rng = np.random.default_rng(0)
        logits = jnp.asarray(rng.normal(size=(20, NUM_EXPERTS)).astype(np.float32))
        ids = rng.random((20, NUM_EXPERTS)).argsort(-1)[:, :TOP_K].astype(np.int32)
        ids[::3, 1] = -1
        target = rng.normal(size=ids.shape).astype(np.float32)
        sigmoid = router is routing.sigmoid_topk

        def replayed(logits: jax.Array) -> Any:
            routed = router(logits, TOP_K, renormalize=renormalize, scale=2.0, topk_ids=ids)
            np.testing.assert_array_equal(routed.topk_ids, ids)
            return (routed.topk_weights * target).sum(), routed.topk_weights

        def expected(logits: jax.Array) -> Any:
            weights = weights_of(logits, ids, sigmoid=sigmoid, renormalize=renormalize)
            return (2 * weights * target).sum(), 2 * weights

        got, want = (jax.value_and_grad(f, has_aux=True)(logits) for f in (replayed, expected))
        assert_close(got, want)
        none = router(logits, TOP_K, renormalize=renormalize, topk_ids=jnp.full_like(ids, -1))
        self.assertFalse(none.topk_weights.any())

    @parameterized.parameters(routing.softmax_topk, routing.sigmoid_topk)
    def test_own_experts_have_the_same_weights(self, router: Any):
        logits, mask = tokens(5, 4), jnp.arange(20).reshape(5, 4) % 3 != 0
        first = router(logits, TOP_K, token_mask=mask, num_groups=4, top_groups=2)
        again = router(logits, TOP_K, token_mask=mask, topk_ids=first.topk_ids)
        jax.tree.map(testing.assert_bitwise, again, first)

    def test_errors(self):
        with self.assertRaisesRegex(errors.ArgumentError, r"topk_ids has shape \(4, 2\); expected"):
            routing.softmax_topk(tokens(4), TOP_K, topk_ids=jnp.zeros((4, 2), jnp.int32))
        with self.assertRaisesRegex(errors.DtypeError, "topk_ids has dtype float32"):
            routing.softmax_topk(tokens(4), TOP_K, topk_ids=jnp.zeros((4, TOP_K)))


class ModuleTest(parameterized.TestCase):
    @parameterized.parameters(
        ((8,), AxisType.Auto), ((3, 5), AxisType.Auto), ((4, 8), AxisType.Explicit)
    )
    def test_routing_of_another_layer(self, shape: tuple[int, ...], kind: AxisType):
        """A step of training repeats the routing of a rollout by older parameters."""
        x, mask = tokens(*shape), jnp.arange(np.prod(shape)).reshape(shape) % 5 != 0
        with jax.set_mesh(make_mesh(kind)):
            _, rollout = make_layer(1)(x, token_mask=mask)
            layer = make_layer()
            _, own = layer(x, token_mask=mask)
            ids = rollout.topk_ids
            self.assertEqual((ids.shape, ids.dtype), ((*shape, TOP_K), jnp.int32))
            self.assertTrue((ids != own.topk_ids).any())

            def loss(layer: Any, x: jax.Array) -> Any:
                y, stats = layer(x, token_mask=mask, topk_ids=ids)
                return jnp.sin(y).sum(), (y, stats)

            run = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True))
            (_, (y, stats)), gradients = run(layer, x)
            testing.assert_bitwise(stats.topk_ids, ids)
            testing.assert_bitwise(stats.expert_load, rollout.expert_load)
        state = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(layer, nnx.Param)))
        gradients = jax.tree.map(np.asarray, gradients)
        alone = make_layer(mesh=testing.mesh_of((1,), ("expert",)))
        nnx.update(alone, state)
        ids, x = np.asarray(ids), np.asarray(x)
        np.testing.assert_array_equal(ids[~mask], -1)

        def expected(layer: Any, x: jax.Array) -> Any:
            y = jnp.where(mask[..., None], dense(layer, x, jnp.where(ids < 0, 0, ids)), 0)
            return jnp.sin(y).sum(), y

        (_, want), grads = nnx.value_and_grad(expected, argnums=(0, 1), has_aux=True)(alone, x)
        assert_close(np.asarray(y), want)
        pure = lambda tree: nnx.to_pure_dict(nnx.state(tree))
        assert_close(pure(gradients[0]), pure(grads[0]))
        assert_close(gradients[1], grads[1])

    @parameterized.parameters(
        {"router": "sigmoid", "selection_bias": True, "num_chunks": 3},
        {"router": functools.partial(routing.softmax_topk, renormalize=False), "local_only": True},
    )
    def test_own_routing_again(self, **options: Any):
        """Bit for bit, in both modules; ids are recorded only where the option says so."""
        x = tokens(5, 3)
        with jax.set_mesh(make_mesh()):
            layer = make_layer(**options)
            y, stats = layer(x)
            again = layer(x, topk_ids=stats.topk_ids)
            jax.tree.map(testing.assert_bitwise, again, (y, stats))
            same = jax_ep.linen.MoE(*SIZES, record_ids=True, **options)
            variables = {"params": nnx.to_pure_dict(nnx.state(layer, nnx.Param))}
            if layer.selection_bias is not None:
                bias = layer.selection_bias[...]
                variables["selection_bias"] = {"selection_bias": bias}
            of_linen = same.apply(variables, x, topk_ids=stats.topk_ids)
            jax.tree.map(testing.assert_bitwise, of_linen, (y, stats))
            silent = jax_ep.linen.MoE(*SIZES, **options).apply(variables, x)[1]
            self.assertIsNone(silent.topk_ids)

    def test_routers_of_ones_own(self):
        def router(logits: jax.Array, top_k: int, topk_ids: Any = None) -> routing.Routing:
            return routing.softmax_topk(2 * logits, top_k, topk_ids=topk_ids)

        x = tokens(8)
        with jax.set_mesh(make_mesh()):
            layer = make_layer(router=router)
            y, stats = layer(x)
            testing.assert_bitwise(layer(x, topk_ids=stats.topk_ids)[0], y)
            other = make_layer(router=lambda logits, k: routing.softmax_topk(logits, k))
            with self.assertRaisesRegex(errors.ArgumentError, "router <lambda> has no argument"):
                other(x, topk_ids=stats.topk_ids)
            with self.assertRaisesRegex(errors.ArgumentError, "topk_ids has shape"):
                layer(x, topk_ids=stats.topk_ids[:, :2])

    def test_in_a_stack(self):
        x = tokens(8)

        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
        def make_layers(key: jax.Array) -> jax_ep.nnx.MoE:
            return jax_ep.nnx.MoE(*SIZES, rngs=nnx.Rngs(key), record_ids=True)

        with jax.set_mesh(make_mesh()):
            layers = make_layers(jax.random.split(jax.random.key(0), 2))
            moe, _ = layers.stack(x)

            @jax.jit
            def run(x: jax.Array, ids: Any) -> Any:
                def block(x: jax.Array, given: Any) -> Any:
                    layer, ids = given
                    y, stats = moe(x, layer, topk_ids=ids)
                    return x + y, stats.topk_ids

                return jax.lax.scan(block, x, (jnp.arange(2), ids))

            y, ids = run(x, None)
            self.assertEqual(ids.shape, (2, 8, TOP_K))
            other = ids[::-1]
            testing.assert_bitwise(run(x, ids)[0], y)
            testing.assert_bitwise(run(x, other)[1], other)

    def test_ids_are_sharded_as_tokens_are(self):
        with jax.set_mesh(make_mesh(AxisType.Explicit)) as _:
            x = jax.device_put(tokens(4, 8), P("data", "expert"))
            layer = make_layer(sequence_axes=("expert",))
            ids = layer(x)[1].topk_ids
            self.assertEqual(jax.typeof(ids).sharding.spec, P("data", "expert", None))


if __name__ == "__main__":
    absltest.main()
