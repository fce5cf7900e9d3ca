"""`stack` of nnx.MoE and linen.MoE: a loop over stacked layers, beside a scan that slices them."""

from __future__ import annotations

import dataclasses
from typing import Any

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_ep.linen
import jax_ep.nnx
from jax_ep import quant, routing
from jax_ep._src.core import errors

NUM_LAYERS = 3
HIDDEN = 16
SIZES = (HIDDEN, 8, 8, 2)
ALL: dict[str, Any] = {
    "tensor_axis": "tensor", "use_bias": True, "logits_bias": True, "selection_bias": True,
    "router": "sigmoid", "shared_intermediate_size": 4, "num_chunks": 2,
    "bias_init": nnx.initializers.normal(0.1),
}  # fmt: skip
MESHES = {"expert": (8,), "data expert": (2, 4), "data expert tensor": (2, 2, 2)}


class LearnedRouter(nnx.Module):
    """A router with a parameter of its own."""

    def __init__(self, rngs: nnx.Rngs):
        self.scale = nnx.Param(jax.random.uniform(rngs.params(), ()) + 0.5)

    def __call__(self, logits, top_k, **_):
        return routing.softmax_topk(logits * self.scale[...], top_k)


def make_mesh(names: str, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    shape = testing.fit(MESHES[names])
    return testing.mesh_of(shape, tuple(names.split()), axis_type=kind)


def make_layers(make_router=None, **options: Any) -> tuple[Any, Any]:
    """The definition and the state of a module of stacked layers."""

    @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
    def make(key):
        rngs = nnx.Rngs(key)
        given = {} if make_router is None else {"router": make_router(rngs)}
        return jax_ep.nnx.MoE(*SIZES, **options, **given, rngs=rngs)

    return nnx.split(make(jax.random.split(jax.random.key(0), NUM_LAYERS)))


def tokens() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (8, 4, HIDDEN))


def sliced(definition, state, x):
    """A scan over the module itself."""

    def block(x, state):
        y, stats = nnx.merge(definition, state)(x)
        return x + y, stats

    return jax.lax.scan(block, x, state)


def chained(definition, state, x, checkpoint=lambda f: f, **options):
    """A loop over its stack, with sums."""
    moe, sums = nnx.merge(definition, state).stack(x)

    @checkpoint
    def block(carry, layer):
        x, sums = carry
        y, stats, sums = moe(x, layer, sums, **options)
        return (x + y, sums), stats

    (x, _), stats = jax.lax.scan(block, (x, sums), jnp.arange(NUM_LAYERS))
    return x, stats


def gradients(f):
    def loss(state, x):
        y, stats = f(state, x)
        return jnp.sin(y).sum() + stats.aux_loss.sum(), (y, stats)

    return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True, allow_int=True))


def assert_close(found, expected, tolerance=1e-5):
    found, expected = (jax.tree.leaves(tree) for tree in (found, expected))
    for a, b in zip(found, expected, strict=True):
        if np.asarray(a).dtype != jax.dtypes.float0:
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


class NnxTest(parameterized.TestCase):
    @parameterized.parameters(
        ("expert", AxisType.Auto, {}),
        ("data expert", AxisType.Auto, {"make_router": LearnedRouter}),
        ("data expert tensor", AxisType.Auto, ALL),
        ("data expert tensor", AxisType.Explicit, ALL),
        ("data expert", AxisType.Auto, {"expert_axis": None}),
    )
    def test_agrees_with_slices(self, names, kind, options):
        with jax.set_mesh(make_mesh(names, kind)):
            definition, state = make_layers(**options)
            results = [
                gradients(lambda state, x, f=f: f(definition, state, x))(state, tokens())
                for f in (sliced, chained)
            ]
        assert_close(*results[::-1])

    def test_checkpointed_in_shard_map(self):
        """Inside of the user's own shard_map the parameters are local views."""
        mesh = make_mesh("data expert")
        with jax.set_mesh(mesh):
            definition, state = make_layers()
            specs = jax.tree.map(
                lambda a: P(None, "expert") if a.ndim > 3 or a.shape[1] == SIZES[2] else P(), state
            )

            def mapped(f, **options):
                def run(state, x):
                    y, stats = f(definition, state, x, **options)
                    return y, stats

                batch = P(("data", "expert"))
                return jax.shard_map(run, in_specs=(specs, batch), out_specs=(batch, P()))

            results = [
                gradients(f)(state, tokens())
                for f in (mapped(sliced), mapped(chained, checkpoint=jax.checkpoint))
            ]
        assert_close(*results[::-1])

    def test_masters_are_cast_once(self):
        """The gradients of float32 masters of bfloat16 layers are not rounded."""
        with jax.set_mesh(make_mesh("expert")):
            definition, state = make_layers(dtype=jnp.bfloat16)
            (found, _), (y, _) = gradients(lambda s, x: chained(definition, s, x))(state, tokens())
            (expected, _), (z, _) = gradients(lambda s, x: sliced(definition, s, x))(
                state, tokens()
            )
        np.testing.assert_array_equal(y, z)
        for name in "w_up", "w_down":
            a, b = (np.asarray(tree[name][...]) for tree in (found, expected))
            assert a.dtype == np.float32 and (a != a.astype(jnp.bfloat16)).any()
            np.testing.assert_allclose(a, b, rtol=0.02, atol=0.02 * abs(b).max())

    def test_without_sums(self):
        mask = np.arange(4) < 3
        with jax.set_mesh(make_mesh("expert")):
            definition, state = make_layers()
            layers = nnx.merge(definition, state)
            moe, _ = layers.stack(tokens())
            y, stats = moe(tokens(), 1, token_mask=np.broadcast_to(mask, (8, 4)))
            one = nnx.merge(definition, jax.tree.map(lambda a: a[1], state))
            expected = one(tokens(), token_mask=np.broadcast_to(mask, (8, 4)))
        assert_close((y, stats), expected)
        self.assertFalse(np.asarray(y)[:, 3].any())

    def test_mistakes(self):
        x = tokens()
        with jax.set_mesh(make_mesh("data expert")):
            with self.assertRaisesRegex(errors.ArgumentError, "expected stacks of equally many"):
                jax_ep.nnx.MoE(*SIZES, rngs=nnx.Rngs(0)).stack(x)
            layers = nnx.merge(*make_layers())
            with self.assertRaisesRegex(errors.ArgumentError, "layer=3 with 3 layers"):
                layers.stack(x)[0](x, 3)
            for option in (
                {"fsdp_axis": "data"},
                {"quantization": quant.Recipe()},
                {"experts_fn": lambda rows, *_: rows},
            ):
                with self.assertRaisesRegex(errors.ArgumentError, f"with {next(iter(option))}"):
                    nnx.merge(*make_layers(**option)).stack(x)


class ShardingsTest(parameterized.TestCase):
    """Metadata and boxes tell the shardings of stacks, their first dimension included."""

    @parameterized.parameters({}, ALL)
    def test_nnx_metadata(self, **options):
        with jax.set_mesh(make_mesh("data expert tensor")):
            definition, state = make_layers(**options)
            shardings = nnx.get_named_sharding(state, jax.sharding.get_mesh())
            layers = nnx.merge(definition, jax.device_put(state, shardings))
            for name in ("w_up", "w_down", "b_up", "shared_w_up"):
                made, placed = (getattr(tree, name, None) for tree in (state, layers))
                if made is not None:
                    self.assertEqual(len(made.out_sharding), made[...].ndim)
                    self.assertTrue(
                        placed[...].sharding.is_equivalent_to(made[...].sharding, made[...].ndim)
                    )
            layers.stack(tokens())

    def test_metadata_without_the_layers_are_refused(self):
        """They would shard the layers instead of the experts."""
        make = nnx.vmap(lambda key: jax_ep.nnx.MoE(*SIZES, rngs=nnx.Rngs(key)))
        keys = jax.random.split(jax.random.key(0), NUM_LAYERS)
        for names in "expert", "data expert":
            refused = self.assertRaisesRegex(errors.ArgumentError, "PARTITION_NAME: None")
            with jax.set_mesh(make_mesh(names)), refused:
                make(keys).stack(tokens())
        with jax.set_mesh(testing.mesh_of((1,), ("expert",))):
            make(keys).stack(tokens())

    @parameterized.parameters(None, "layers", "stage")
    def test_linen_boxes(self, name):
        """A name that is no axis of the mesh is translated by rules, or shards nothing."""
        with jax.set_mesh(testing.mesh_of((2, 4), ("stage", "expert"))):
            model = scanned(4, {nn.PARTITION_NAME: name}, batch_axes=("expert",))
            boxed = model.init(jax.random.key(0), tokens(), None)
            for rules, layers in (
                ((), "stage" if name == "stage" else None),
                ((("layers", "stage"),), name and "stage"),
            ):
                with nn.logical_axis_rules(rules):
                    spec = nn.get_partition_spec(boxed)["params"]["moe"]["w_up"]
                    self.assertEqual(spec, P(layers, "expert", None, None, None))
                    variables = nn.unbox(boxed)
                    w_up = variables["params"]["moe"]["w_up"]
                    self.assertEqual(w_up.sharding.spec[:2], (layers, "expert"))
            shardings = nn.get_sharding(boxed, jax.sharding.get_mesh())
            jax.device_put(variables, nn.unbox(shardings))
            model.apply(boxed, tokens(), None)
            of_layer = {"params": boxed["params"]["moe"]}
            jax_ep.linen.MoE(*SIZES, batch_axes=("expert",)).stack(of_layer, tokens())


def scanned(length: int, metadata: dict[str, Any], **options: Any) -> nn.Module:
    """A model of linen whose layers are scanned."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            y, stats = jax_ep.linen.MoE(*SIZES, **options, name="moe")(x)
            return x + y, stats

    return nn.scan(
        Block,
        variable_axes={"params": 0, "selection_bias": 0},
        split_rngs={"params": True},
        length=length,
        metadata_params=metadata,
    )()


class LinenTest(absltest.TestCase):
    def test_agrees_with_nn_scan(self):
        with jax.set_mesh(make_mesh("data expert")):
            model = scanned(NUM_LAYERS, {nn.PARTITION_NAME: "layers"}, selection_bias=True)
            variables = nn.unbox(model.init(jax.random.key(0), tokens(), None))

            def stacked(variables, x):
                of_layer = {name: tree["moe"] for name, tree in variables.items()}
                module = jax_ep.linen.MoE(*SIZES, selection_bias=True)
                moe, sums = module.stack(of_layer, x)

                def block(carry, layer):
                    x, sums = carry
                    y, stats, sums = moe(x, layer, sums)
                    return (x + y, sums), stats

                (x, _), stats = jax.lax.scan(block, (x, sums), jnp.arange(NUM_LAYERS))
                return x, stats

            expected = gradients(lambda v, x: model.apply(v, x, None))(variables, tokens())
            found = gradients(stacked)(variables, tokens())
        assert_close(found, expected)

    def test_routers(self):
        """A pytree's arrays are those of all layers. A module has variables of its own."""

        @jax.tree_util.register_dataclass
        @dataclasses.dataclass
        class Scaled:
            scale: jax.Array

            def __call__(self, logits, top_k):
                return routing.softmax_topk(logits * self.scale, top_k)

        x = tokens()
        with jax.set_mesh(make_mesh("expert")):
            module = jax_ep.linen.MoE(*SIZES, router=Scaled(jnp.ones(8) / 2))
            variables = nn.unbox(module.init(jax.random.key(0), x))
            stacks = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), variables)
            moe, _ = module.stack(stacks, x)
            assert_close(moe(x, 0), module.apply(variables, x))
            module = jax_ep.linen.MoE(*SIZES, router=nn.Dense(2))
            with self.assertRaisesRegex(errors.ArgumentError, "router Dense has variables"):
                module.stack(stacks, x)


if __name__ == "__main__":
    absltest.main()
