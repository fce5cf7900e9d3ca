"""nnx.MoE: the same numbers on every mesh, and those of a loop over experts."""

from __future__ import annotations

from typing import Any

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from nnx_layers import (
    BATCH,
    HIDDEN,
    INTERMEDIATE,
    MESHES,
    NUM_EXPERTS,
    TOP_K,
    assert_close,
    make_layer,
    make_mesh,
    one_device,
    tokens,
)

from jax_ep import routing
from jax_ep.nnx import MoE, MoEStats


def weighted(y: jax.Array, stats: MoEStats) -> tuple[jax.Array, MoEStats]:
    """A loss in which output, balancing loss and z loss weigh about the same."""
    return 0.01 * (y.astype(jnp.float32) ** 2).sum() + stats.aux_loss + 0.1 * stats.z_loss, stats


def loss_and_gradients(layer: MoE, x: jax.Array) -> Any:
    """((loss, stats), (gradients of the parameters, gradient of x)), as numpy."""

    def loss(layer: MoE, x: jax.Array) -> Any:
        return weighted(*layer(x))

    value, (grads, x_grad) = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True))(
        layer, x
    )
    return jax.tree.map(np.asarray, (value, (nnx.to_pure_dict(nnx.state(grads)), x_grad)))


def dense(layer: MoE, x: jax.Array) -> Any:
    """Every expert on every token, in a loop; MoEStats by the same formulas, unsharded."""
    flat = x.reshape(-1, HIDDEN)
    logits = flat @ layer.router_kernel[...]
    probabilities = jax.nn.softmax(logits)
    top, ids = jax.lax.top_k(probabilities, TOP_K)
    top = top / top.sum(-1, keepdims=True)
    y = jnp.zeros_like(flat)
    for expert in range(NUM_EXPERTS):
        w_up, w_down = layer.w_up[expert], layer.w_down[expert]
        if w_up.ndim == 3:
            hidden = jax.nn.silu(flat @ w_up[:, 0]) * (flat @ w_up[:, 1])
        else:
            hidden = jax.nn.relu(flat @ w_up)
        weight = jnp.where(ids == expert, top, 0).sum(-1)
        y += weight[:, None] * (hidden @ w_down)
    counts = jnp.stack([(ids == expert).sum() for expert in range(NUM_EXPERTS)])
    aux = NUM_EXPERTS * (counts / counts.sum() * probabilities.mean(0)).sum()
    z = (jax.nn.logsumexp(logits, axis=-1) ** 2).mean()
    return y.reshape(x.shape), MoEStats(aux, z, counts, jnp.int32(0))


class MeshTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.unsharded = loss_and_gradients(make_layer(mesh=one_device()), tokens())

    def test_unsharded_equals_dense_loop(self):
        def loss(layer: MoE, x: jax.Array) -> Any:
            return weighted(*dense(layer, x))

        value, (grads, x_grad) = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
            make_layer(), tokens()
        )
        assert_close(
            self.unsharded, (value, (nnx.to_pure_dict(nnx.state(grads)), x_grad)), rtol=1e-4
        )

    @parameterized.parameters(
        *((mesh, AxisType.Auto) for mesh in MESHES),
        ("all", AxisType.Explicit),
    )
    def test_same_numbers(self, mesh: str, kind: AxisType):
        with jax.set_mesh(make_mesh(mesh, kind)):
            assert_close(
                loss_and_gradients(make_layer(**MESHES[mesh][2]), tokens()), self.unsharded
            )

    def test_explicit_axes_keep_the_sharding_of_x(self):
        mesh = make_mesh("data_expert", AxisType.Explicit)
        with jax.set_mesh(mesh):
            x = jax.device_put(tokens(), jax.NamedSharding(mesh, P("data")))
            y, stats = make_layer()(x)
        self.assertEqual(y.sharding.spec, P("data", None, None))
        assert_close(jax.tree.map(np.asarray, (y, stats)), make_layer()(tokens()))

    def test_mixed_kinds_of_axes(self):
        kinds = (AxisType.Explicit, AxisType.Auto)
        mesh = jax.make_mesh(testing.fit((2, 4)), ("data", "expert"), axis_types=kinds)
        with jax.set_mesh(mesh):
            got = make_layer()(tokens())
        assert_close(jax.tree.map(np.asarray, got), make_layer()(tokens()))

    def test_parameters_are_equal_and_sharded(self):
        whole = make_layer()
        with jax.set_mesh(make_mesh("all")):
            parts = make_layer(**MESHES["all"][2])
        for name in ("router_kernel", "w_up", "w_down"):
            np.testing.assert_array_equal(getattr(whole, name)[...], getattr(parts, name)[...])
        self.assertEqual(parts.w_up[...].sharding.spec, P("expert", "data", None, "tensor"))
        self.assertEqual(parts.w_down[...].sharding.spec, P("expert", "tensor", "data"))
        self.assertEqual(
            nnx.get_partition_spec(nnx.state(parts))["w_up"].get_value(),
            P("expert", "data", None, "tensor"),
        )

    def test_initial_scale(self):
        layer = MoE(256, 128, 4, 2, rngs=nnx.Rngs(0))
        self.assertAlmostEqual(float(layer.w_up[...].std()), 256**-0.5, delta=1e-3)
        self.assertAlmostEqual(float(layer.w_down[...].std()), 128**-0.5, delta=1e-3)
        self.assertAlmostEqual(float(layer.router_kernel[...].std()), 256**-0.5, delta=5e-3)

    def test_made_in_jit(self):
        with jax.set_mesh(make_mesh("data_expert")):
            made = nnx.jit(lambda: make_layer())()
        expected = jax.NamedSharding(make_mesh("data_expert"), P("expert"))
        self.assertTrue(made.w_up[...].sharding.is_equivalent_to(expected, made.w_up[...].ndim))
        np.testing.assert_array_equal(made.w_up[...], make_layer().w_up[...])

    def test_made_in_vmap(self):
        """The layers of a scanned model: no device holds all of them."""
        with jax.set_mesh(make_mesh("data_expert")):
            made = nnx.vmap(lambda rngs: make_layer(rngs=rngs))(nnx.Rngs(0).split(3))
        expected = jax.NamedSharding(make_mesh("data_expert"), P(None, "expert"))
        self.assertTrue(made.w_up[...].sharding.is_equivalent_to(expected, made.w_up[...].ndim))


class InsideShardMapTest(parameterized.TestCase):
    def test_local_views(self):
        """In a shard_map over all axes the layer takes the local shards."""
        with jax.set_mesh(make_mesh("all")):
            layer = make_layer(**MESHES["all"][2])
            graph, state = nnx.split(layer)
            axes = layer.config.axes.within(jax.sharding.get_abstract_mesh().axis_names)

            def loss(state: Any, x: jax.Array) -> Any:
                run = jax.shard_map(
                    lambda state, x: nnx.merge(graph, state)(x),
                    in_specs=(nnx.get_partition_spec(state), P(axes.tokens)),
                    out_specs=(P(axes.tokens), P()),
                )
                return weighted(*run(state, x))

            got = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(state, tokens())
            value, (grads, x_grad) = jax.tree.map(np.asarray, got)
        expected = loss_and_gradients(make_layer(mesh=one_device()), tokens())
        assert_close((value, (nnx.to_pure_dict(grads), x_grad)), expected)

    def test_expert_axis_alone_is_manual(self):
        with jax.set_mesh(make_mesh("data_expert")):
            graph, state = nnx.split(make_layer())

            def run(state: Any, x: jax.Array) -> Any:
                return jax.shard_map(
                    lambda state, x: nnx.merge(graph, state)(x),
                    in_specs=(nnx.get_partition_spec(state), P("expert")),
                    out_specs=(P("expert"), P()),
                    axis_names={"expert"},
                )(state, x)

            got = jax.jit(run)(state, tokens())
        assert_close(jax.tree.map(np.asarray, got), make_layer()(tokens()))

    def test_another_axis_is_manual(self):
        """Inside a shard_map over "data" only, the layer opens one over the expert axis."""
        with jax.set_mesh(make_mesh("data_expert")):
            layer = make_layer()
            run = jax.shard_map(
                lambda x: layer(x), in_specs=P("data"), out_specs=(P("data"), P()),
                axis_names={"data"},
            )  # fmt: skip
            got = jax.jit(run)(tokens())
        assert_close(jax.tree.map(np.asarray, got), make_layer()(tokens()))


class OptionsTest(parameterized.TestCase):
    def test_eager_equals_jit(self):
        layer = make_layer(mesh=one_device())
        assert_close(layer(tokens()), nnx.jit(lambda m, x: m(x))(layer, tokens()), rtol=1e-6)

    def test_plain_activation(self):
        layer = make_layer(activation="relu")
        self.assertEqual(layer.w_up.shape, (NUM_EXPERTS, HIDDEN, INTERMEDIATE))
        assert_close(layer(tokens()), dense(layer, tokens()), rtol=1e-4)
        as_function = make_layer(activation=jax.nn.relu)
        assert_close(as_function(tokens()), layer(tokens()))

    def test_routers(self):
        by_name = make_layer(router="sigmoid")(tokens())
        by_function = make_layer(router=routing.sigmoid_topk)(tokens())
        assert_close(by_function, by_name)
        self.assertGreater(np.abs(by_name[0] - make_layer()(tokens())[0]).max(), 1e-3)

        def limited(logits: jax.Array, top_k: int) -> routing.Routing:
            return routing.sigmoid_topk(logits, top_k, num_groups=4, top_groups=1)

        stats = make_layer(router=limited)(tokens())[1]
        self.assertEqual(stats.expert_load.sum(), BATCH * 5 * TOP_K)

    def test_two_dimensional_input(self):
        x = tokens()
        y, _ = make_layer()(x.reshape(-1, HIDDEN))
        assert_close(y.reshape(x.shape), make_layer()(x)[0])

    def test_bfloat16_over_float32_parameters(self):
        layer = make_layer(dtype=jnp.bfloat16)
        y, _ = layer(tokens())
        self.assertEqual(y.dtype, jnp.bfloat16)
        assert_close(np.asarray(y, np.float32), make_layer()(tokens())[0], rtol=3e-2)
        layer = make_layer(dtype=jnp.bfloat16, mesh=one_device())
        grads = nnx.eval_shape(nnx.grad(lambda m: weighted(*m(tokens()))[0]), layer)
        self.assertEqual({g.dtype for g in jax.tree.leaves(grads)}, {jnp.dtype(jnp.float32)})

    def test_bfloat16_parameters(self):
        layer = make_layer(param_dtype=jnp.bfloat16)
        y, stats = layer(tokens())
        self.assertEqual(y.dtype, jnp.float32)
        assert_close((y, stats), dense(layer, tokens()), rtol=1e-4)

    @parameterized.parameters("expert", "data_expert", "tensor", "bystander")
    def test_capacity(self, mesh: str):
        """All tokens want experts 0 and 1, which the ranks that hold them have room for 3/4 of."""
        batch = 576 if mesh == "bystander" else 288
        num_assignments = batch * 5 * TOP_K
        shape = dict(make_mesh(mesh).shape)
        num_groups, num_ranks = shape.get("data", 1) * shape.get("model", 1), shape["expert"]
        experts_there = 1 if num_ranks == NUM_EXPERTS else 2
        factor = 0.75 * num_ranks * experts_there / 2
        with jax.set_mesh(make_mesh(mesh)):
            layer = make_layer(capacity_factor=factor, **MESHES[mesh][2])
            layer.router_kernel[...] = jnp.zeros_like(layer.router_kernel[...])
            y, stats = layer(tokens(batch=batch))
        room = int(factor * num_assignments) // num_groups // num_ranks
        self.assertGreater(room, 1024)  # fewer rows are never cut into
        wanted = (
            num_assignments // 2 // num_groups // num_ranks
        )  # one source's demand for one expert
        quota = min(room // experts_there // num_ranks, wanted)
        self.assertGreater(stats.num_dropped, 0)
        self.assertEqual(stats.num_dropped, num_assignments - num_groups * 2 * num_ranks * quota)
        np.testing.assert_array_equal(stats.expert_load, [num_assignments // 2] * 2 + [0] * 6)
        self.assertTrue(np.isfinite(y).all())

    @parameterized.parameters("expert", "all")
    def test_no_tokens(self, mesh: str):
        """Losses and gradients of nothing are zeros, not NaN."""
        with jax.set_mesh(make_mesh(mesh)):
            layer = make_layer(**MESHES[mesh][2])
            value, grads = loss_and_gradients(layer, tokens(batch=0))
        self.assertEqual(grads[1].shape, (0, 5, HIDDEN))
        for leaf in jax.tree.leaves((value, grads)):
            self.assertFalse(leaf.any())

    def test_dropless_by_default(self):
        layer = make_layer()
        layer.router_kernel[...] = jnp.zeros_like(layer.router_kernel[...])
        self.assertEqual(layer(tokens())[1].num_dropped, 0)


if __name__ == "__main__":
    absltest.main()
