"""Experts that do not divide over the ranks: the modules pad inside, and nothing is of the padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from nnx_layers import assert_close

import jax_ep
import jax_ep.linen
import jax_ep.nnx
from jax_ep import quant, routing

HIDDEN, INTERMEDIATE, TOP_K = 32, 16, 2
NUM_RANKS = testing.NUM_DEVICES
NUM_EXPERTS = 2 * NUM_RANKS - 1 if NUM_RANKS > 1 else 3
NUM_PADDED = -(-NUM_EXPERTS // NUM_RANKS) * NUM_RANKS
SIZES = HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K
OF_EXPERTS = {"w_up", "w_down", "b_up", "b_down"}
ALL: dict[str, Any] = {
    "use_bias": True, "bias_init": nnx.initializers.normal(0.1), "logits_bias": True,
    "shared_intermediate_size": 8,
}  # fmt: skip


def mesh_of(num_ranks: int = NUM_RANKS, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return testing.mesh_of((num_ranks,), ("expert",), axis_type=kind)


def tokens(count: int = 8 * NUM_RANKS) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (count, HIDDEN))


def make_nnx(mesh: jax.sharding.Mesh | None = None, **options: Any) -> jax_ep.nnx.MoE:
    return jax_ep.nnx.MoE(*SIZES, mesh=mesh, **options, rngs=nnx.Rngs(0))


def params_of(layer: jax_ep.nnx.MoE) -> Any:
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(layer, nnx.Param)))


def pad(params: Any, size: int = NUM_PADDED) -> Any:
    """The parameters of the experts, or their gradients, with zeros in the padding."""

    def of(name: str, a: np.ndarray) -> np.ndarray:
        missing = size - a.shape[0] if name in OF_EXPERTS else 0
        return np.pad(a, ((0, missing), *((0, 0),) * (a.ndim - 1)))

    return {name: of(name, np.asarray(a)) for name, a in params.items()}


def in_nnx(mesh: jax.sharding.Mesh, **options: Any) -> Callable[..., Any]:
    graph, rest = nnx.split(make_nnx(mesh, **options))

    def apply(params: Any, x: jax.Array) -> Any:
        state = jax.tree.map(lambda leaf: leaf, rest)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)(x)

    return apply


def in_linen(mesh: jax.sharding.Mesh, **options: Any) -> Callable[..., Any]:
    layer = jax_ep.linen.MoE(*SIZES, mesh=mesh, **options)
    return lambda params, x: layer.apply({"params": params}, x)


def loss_of(y: jax.Array, stats: Any) -> Any:
    value = 0.01 * jnp.square(y - jnp.cos(jnp.arange(HIDDEN))).sum()
    return value + stats.aux_loss + 0.1 * stats.z_loss, (y, stats)


def outputs_and_gradients(apply: Callable[..., Any], params: Any) -> Any:
    loss = lambda params, x: loss_of(*apply(params, x))
    got = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, tokens())
    (of_params, of_x), outputs = jax.tree.map(np.asarray, got)
    return outputs, of_x, of_params


class PaddedExpertsTest(parameterized.TestCase):
    def test_initial_values(self):
        """The experts are those of one device; the rest are zeros, and all is sharded evenly."""
        whole = params_of(make_nnx(**ALL))
        layer = make_nnx(mesh_of(), **ALL)
        self.assertEqual(layer.w_down.shape, (NUM_PADDED, INTERMEDIATE, HIDDEN))
        self.assertEqual(layer.w_up[...].sharding.spec[0], "expert")
        self.assertEqual(layer.router_kernel.shape, (HIDDEN, NUM_EXPERTS))
        jax.tree.map(np.testing.assert_array_equal, params_of(layer), pad(whole))
        of_linen = jax_ep.linen.MoE(*SIZES, mesh=mesh_of(), **ALL)
        made = nn.unbox(of_linen.init(jax.random.key(0), tokens()))["params"]
        for name, expected in pad(whole).items():
            self.assertEqual(made[name].shape, expected.shape)
            if name in OF_EXPERTS:
                self.assertFalse(np.asarray(made[name])[NUM_EXPERTS:].any())

    @parameterized.parameters(
        (in_nnx, {}),
        (in_nnx, ALL),
        (in_linen, ALL),
        (in_nnx, {"local_only": True, "router": "sigmoid"}),
        (in_nnx, {"num_chunks": 2, "remat": "experts"}),
        (in_nnx, ALL | {"kind": AxisType.Explicit}),
    )
    def test_values_and_gradients(self, make: Callable[..., Any], options: dict[str, Any]):
        """Those of a layer on one device, losses and loads among them."""
        options = dict(options)
        mesh = mesh_of(kind=options.pop("kind", AxisType.Auto))
        params = params_of(make_nnx(**options))
        *expected, of_params = outputs_and_gradients(make(mesh_of(1), **options), params)
        with jax.set_mesh(mesh):
            got = outputs_and_gradients(make(mesh, **options), pad(params))
        self.assertEqual(got[0][1].expert_load.shape, (NUM_EXPERTS,))
        assert_close(got, (*expected, pad(of_params)), rtol=5e-5)

    @parameterized.parameters(in_nnx, in_linen)
    def test_adamw(self, make: Callable[..., Any]):
        """With weight decay, and a logits bias: no NaN, and the padding stays zero."""
        optimizer = optax.adamw(1e-2, weight_decay=0.1)
        apply = make(mesh_of(), **ALL)

        @jax.jit
        def step(params: Any, state: Any) -> Any:
            grads = jax.grad(lambda params: loss_of(*apply(params, tokens()))[0])(params)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        params = pad(params_of(make_nnx(**ALL)))
        state = optimizer.init(params)
        for _ in range(3):
            params, state = step(params, state)
        for name, value in params.items():
            self.assertTrue(np.isfinite(value).all(), name)
            if name in OF_EXPERTS:
                self.assertFalse(np.asarray(value)[NUM_EXPERTS:].any(), name)

    def test_updated_bias(self):
        """Steps that balance the load send no token to the padding, and one to each expert."""
        layer = make_nnx(mesh_of(), router="sigmoid", selection_bias=True)
        self.assertEqual(layer.selection_bias.shape, (NUM_EXPERTS,))
        count = tokens().shape[0] * TOP_K

        @nnx.jit
        def step(layer: jax_ep.nnx.MoE) -> jax.Array:
            load = layer(tokens())[1].expert_load
            layer.selection_bias[...] = routing.updated_bias(
                layer.selection_bias[...], load, rate=0.02
            )
            return load

        for _ in range(40):
            load = np.asarray(step(layer))
            self.assertEqual(load.sum(), count)
        self.assertGreater(load.min(), 0)

    def test_ids_of_the_padding(self):
        """A router that gives them gets what any bad id gets: nothing."""

        def router(logits: jax.Array, top_k: int) -> routing.Routing:
            routed = routing.softmax_topk(logits, top_k)
            ids = routed.topk_ids.at[:, 1].set(NUM_EXPERTS)
            return routing.Routing(ids, routed.topk_weights, routed.probabilities)

        options = ALL | {"router": router}
        params = params_of(make_nnx(**options))
        got = in_nnx(mesh_of(), **options)(pad(params), tokens())
        expected = in_nnx(mesh_of(1), **options)(params, tokens())
        assert_close(*jax.tree.map(np.asarray, (got, expected)), rtol=5e-5)

    def test_another_mesh(self):
        """Parameters that were padded for one mesh are used on another, and saved without padding."""
        params = params_of(make_nnx(**ALL))
        expected = in_nnx(mesh_of(1), **ALL)(params, tokens())
        for make in in_nnx, in_linen:
            got = make(mesh_of(1), **ALL)(pad(params), tokens())
            assert_close(*jax.tree.map(np.asarray, (got, expected)), rtol=5e-5)

    def test_a_mesh_that_was_not_known(self):
        if NUM_RANKS == 1:
            return
        layer = make_nnx()
        message = f"have {NUM_EXPERTS} experts.*expected {NUM_PADDED}, .*Make the layer where its"
        with jax.set_mesh(mesh_of()), self.assertRaisesRegex(jax_ep.ArgumentError, message):
            layer(tokens())

    def test_experts_of_all_ranks_on_each(self):
        """Inside a shard_map, whole matrices would be taken for many more experts."""
        if NUM_RANKS == 1:
            return
        graph, state = nnx.split(make_nnx())
        run = jax.shard_map(
            lambda state, x: nnx.merge(graph, state)(x)[0],
            mesh=mesh_of(),
            in_specs=(P(), P("expert")),
            out_specs=P("expert"),
        )
        with self.assertRaisesRegex(jax_ep.ArgumentError, "experts on each rank.*expected 2, "):
            jax.jit(run)(state, tokens())

    def test_capacity(self):
        """A rank without padding has room for its share: the factor is of the experts there are."""
        count = 2048 * NUM_RANKS

        def router(logits: jax.Array, top_k: int) -> routing.Routing:
            order = jnp.arange(logits.shape[0])[:, None] * top_k + jnp.arange(top_k)
            ids = (order % NUM_EXPERTS).astype(jnp.int32)
            return routing.Routing(ids, jnp.ones(ids.shape), jax.nn.softmax(logits))

        layer = make_nnx(mesh_of(), capacity_factor=1.01, router=router)
        self.assertEqual(nnx.jit(lambda layer, x: layer(x))(layer, tokens(count))[1].num_dropped, 0)

    def test_a_stack(self):
        """Layers of a scan, read in place."""
        with jax.set_mesh(mesh_of()):
            make = nnx.vmap(
                lambda rngs: jax_ep.nnx.MoE(*SIZES, rngs=rngs),
                transform_metadata={nnx.PARTITION_NAME: None},
            )
            layers = make(nnx.Rngs(0).split(2))
            stack, _ = layers.stack(tokens())
            got = jax.jit(lambda x: stack(x, 1))(tokens())
        single = jax.tree.map(lambda a: a[1], params_of(layers))
        unpadded = {n: a[:NUM_EXPERTS] if n in OF_EXPERTS else a for n, a in single.items()}
        expected = in_nnx(mesh_of(1))(unpadded, tokens())
        assert_close(*jax.tree.map(np.asarray, (got, expected)), rtol=5e-5)

    def test_quantized(self):
        """Quantized once per step, and as a checkpoint that is padded when it is read."""
        recipe = quant.Recipe(*(quant.Fp8Row(),) * 2)
        layer = make_nnx(mesh_of(), quantization=recipe)
        x = tokens().astype(jnp.bfloat16)
        quantized = layer.quantize_weights()
        self.assertEqual(quantized[0].forward.shape[0], NUM_PADDED)
        expected = np.asarray(make_nnx(mesh_of(1), quantization=recipe)(x)[0], np.float32)
        y, _ = layer(x, quantized_weights=quantized)
        testing.assert_close(np.asarray(y, np.float32), expected, dtype=jnp.bfloat16)
        only = make_nnx(mesh_of(), quantization=recipe, quantized_only=True)
        y, _ = only(x, quantized_weights=quantized)
        testing.assert_close(np.asarray(y, np.float32), expected, dtype=jnp.bfloat16)

    def test_memory(self):
        """memory() takes the same sizes as the module does."""
        memory = lambda num_experts: jax_ep.memory(64, HIDDEN, INTERMEDIATE, num_experts, 2, 8)
        self.assertEqual(memory(15), memory(16))


if __name__ == "__main__":
    absltest.main()
