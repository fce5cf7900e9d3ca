"""linen.MoE is nnx.MoE: options, parameters, shardings, statistics, and the losses of a training."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

import jax_ep.linen
import jax_ep.nnx
from jax_ep import routing

HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K = 16, 8, 8, 2
SIZES = (HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K)
ALL: dict[str, Any] = {
    "fsdp_axis": "data", "tensor_axis": "tensor", "use_bias": True, "logits_bias": True,
    "shared_intermediate_size": 4, "shared_gate": True, "weights_on_input": True,
    "bias_init": nnx.initializers.normal(0.1),
}  # fmt: skip


def make_mesh() -> jax.sharding.Mesh:
    return testing.mesh_of(testing.fit((2, 2, 2)), ("data", "expert", "tensor"))


def tokens(seed: int = 1) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (8, 3, HIDDEN))


def both(**options: Any) -> tuple[jax_ep.nnx.MoE, jax_ep.linen.MoE, Any]:
    """The two layers, and the parameters of the first for the second."""
    of_nnx = jax_ep.nnx.MoE(*SIZES, **options, rngs=nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(of_nnx, nnx.Param))
    return of_nnx, jax_ep.linen.MoE(*SIZES, **options), params


def loss_of(y: jax.Array, stats: Any) -> jax.Array:
    return jnp.square(y - jnp.cos(jnp.arange(HIDDEN))).mean() + 0.01 * stats.aux_loss


class SameLayerTest(parameterized.TestCase):
    def test_same_options(self):
        fields = {f.name: f.default for f in dataclasses.fields(jax_ep.linen.MoE)}
        fields.pop("parent"), fields.pop("name"), fields.pop("logical_axes")
        given = dict(inspect.signature(jax_ep.nnx.MoE.__init__).parameters)
        given.pop("self"), given.pop("rngs")
        defaults = {
            name: dataclasses.MISSING if p.default is p.empty else p.default
            for name, p in given.items()
        }
        self.assertEqual(fields, defaults)
        documented = inspect.getdoc(jax_ep.nnx.MoE.__init__)
        self.assertEqual([n for n in given if f"\n  {n}: " not in documented], [])

    def test_unknown_and_missing_options(self):
        for options, words in (
            ({"hidden": 3, "rngs": nnx.Rngs(0)}, "unexpected keyword argument 'hidden'"),
            ({}, "missing 1 required keyword-only argument: 'rngs'"),
        ):
            with self.assertRaisesRegex(TypeError, rf"MoE.__init__\(\) .*{words}"):
                jax_ep.nnx.MoE(*SIZES, **options)

    def test_same_checkpoint(self):
        """Names, shapes and dtypes, with every option that has parameters."""
        with jax.set_mesh(make_mesh()):
            _, of_linen, params = both(**ALL)
            made = of_linen.init(jax.random.key(0), tokens())
        shapes = lambda tree: jax.tree.map(lambda a: (a.shape, a.dtype), tree)
        self.assertEqual(shapes(nn.unbox(made["params"])), shapes(params))

    def test_shardings(self):
        with jax.set_mesh(make_mesh()):
            of_nnx, of_linen, _ = both(**ALL)
            make = lambda: of_linen.init(jax.random.key(0), tokens())
            specs = nn.get_partition_spec(jax.eval_shape(make))["params"]
            made = make()["params"]
        expected = nnx.get_partition_spec(nnx.state(of_nnx, nnx.Param))
        self.assertEqual(specs, nnx.to_pure_dict(expected))
        self.assertEqual(specs["w_up"], P("expert", "data", None, "tensor"))
        w_up = made["w_up"].unbox(apply_constraint=False)
        self.assertEqual(w_up.sharding.spec, P("expert", "data", None, "tensor"))

    def test_training_gives_the_same_losses(self):
        """Four steps of Adam on one model, with all its parameters, on data x expert x tensor."""
        optimizer = optax.adam(3e-3)
        with jax.set_mesh(make_mesh()):
            of_nnx, of_linen, params = both(**ALL)
            graph, rest = nnx.split(of_nnx)

            def nnx_loss(params: Any, x: jax.Array) -> jax.Array:
                state = jax.tree.map(lambda leaf: leaf, rest)
                nnx.replace_by_pure_dict(state, params)
                return loss_of(*nnx.merge(graph, state)(x))

            def linen_loss(params: Any, x: jax.Array) -> jax.Array:
                return loss_of(*of_linen.apply({"params": params}, x))

            losses = [self.train(optimizer, loss, params) for loss in (nnx_loss, linen_loss)]
        np.testing.assert_array_equal(*losses)
        self.assertLess(losses[0][-1], 0.9 * losses[0][0])

    def train(self, optimizer: Any, loss: Any, params: Any) -> list[float]:
        @jax.jit
        def step(params: Any, state: Any, x: jax.Array) -> Any:
            value, grads = jax.value_and_grad(loss)(params, x)
            updates, state = optimizer.update(grads, state)
            return optax.apply_updates(params, updates), state, value

        state, losses = optimizer.init(params), []
        for _ in range(4):
            params, state, value = step(params, state, tokens())
            losses.append(float(value))
        return losses


class CallTest(parameterized.TestCase):
    def test_statistics_are_a_pytree(self):
        with jax.set_mesh(make_mesh()):
            of_nnx, of_linen, params = both(tensor_axis="tensor")
            mask = jax.random.bernoulli(jax.random.key(2), 0.5, (8, 3))
            run = jax.jit(
                lambda params: of_linen.apply({"params": params}, tokens(), token_mask=mask)
            )
            y, stats = run(params)
            self.assertIsInstance(stats, jax_ep.linen.MoEStats)
            expected = jax.jit(lambda: of_nnx(tokens(), token_mask=mask))()
        jax.tree.map(np.testing.assert_array_equal, (y, stats), expected)

    def test_selection_bias_is_a_variable(self):
        of_linen = jax_ep.linen.MoE(*SIZES, selection_bias=True, mesh=testing.expert_mesh(1))
        variables = of_linen.init(jax.random.key(0), tokens())
        self.assertEqual(set(variables), {"params", "selection_bias"})
        variables["selection_bias"]["selection_bias"] = jnp.zeros(NUM_EXPERTS).at[:2].set(100.0)
        load = of_linen.apply(variables, tokens())[1].expert_load
        np.testing.assert_array_equal(load, [24, 24] + [0] * 6)

    def test_router_of_ones_own(self):
        def router(logits: jax.Array, top_k: int) -> routing.Routing:
            return routing.softmax_topk(-logits, top_k)

        mesh = testing.expert_mesh(1)
        of_nnx, of_linen, params = both(router=router, mesh=mesh)
        got, expected = of_linen.apply({"params": params}, tokens()), of_nnx(tokens())
        jax.tree.map(np.testing.assert_array_equal, got, expected)

    def test_router_with_parameters(self):
        """A module: its parameters are trained, equally on any mesh."""

        class Router(nn.Module):
            @nn.compact
            def __call__(self, logits: jax.Array, top_k: int) -> routing.Routing:
                temperature = self.param("temperature", nn.initializers.ones, ())
                return routing.softmax_topk(logits * temperature, top_k)

        of_linen = jax_ep.linen.MoE(*SIZES, router=Router())

        def gradient(mesh: jax.sharding.Mesh) -> Any:
            with jax.set_mesh(mesh):
                params = nn.unbox(jax.jit(of_linen.init)(jax.random.key(0), tokens()))["params"]
                run = jax.grad(
                    lambda params: loss_of(*of_linen.apply({"params": params}, tokens()))
                )
                return np.asarray(jax.jit(run)(params)["router"]["temperature"])

        expected = gradient(testing.expert_mesh(1))
        self.assertGreater(abs(expected), 1e-4)
        np.testing.assert_allclose(gradient(testing.expert_mesh()), expected, rtol=1e-4)

    def test_inside_shard_map(self):
        """Parameters are this rank's views."""
        mesh = testing.expert_mesh()
        with jax.set_mesh(mesh):
            of_nnx, of_linen, params = both()
            specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(of_nnx, nnx.Param)))
            run = jax.shard_map(
                lambda params, x: of_linen.apply({"params": params}, x),
                in_specs=(specs, P("expert")),
                out_specs=(P("expert"), P()),
            )
            got, expected = jax.jit(run)(params, tokens()), of_nnx(tokens())
        jax.tree.map(np.testing.assert_array_equal, got, expected)

    def test_wrong_options(self):
        for options, text in (
            ({"router": "hash"}, "router='hash'"),
            ({"num_chunks": 0}, "num_chunks"),
        ):
            with self.assertRaisesRegex(ValueError, text):
                jax_ep.linen.MoE(*SIZES, **options).init(jax.random.key(0), tokens())


if __name__ == "__main__":
    absltest.main()
