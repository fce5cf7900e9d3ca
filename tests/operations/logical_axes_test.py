"""linen.MoE under Flax's logical partitioning: shardings of parameters and moments by rules."""

from __future__ import annotations

import warnings
from typing import Any

import testing  # isort: skip

import jax
import numpy as np
import optax
from absl.testing import absltest, parameterized
from flax import linen as nn
from jax.sharding import PartitionSpec as P

import jax_ep.linen
from jax_ep._src.core import errors, primitive

SIZES = HIDDEN, INTERMEDIATE, NUM_EXPERTS, _ = 16, 8, 8, 2
NAMES = {"experts": "exp", "hidden": "embed", "intermediate": "mlp"}
# As MaxText's: earlier rules win, and a name may have several.
RULES = (
    ("activation_batch", ("data", "expert")),
    ("layers", None),
    ("exp", "expert"),
    ("mlp", "tensor"),
    ("embed", "data"),
)
OPTIONS: dict[str, Any] = {
    "fsdp_axis": "data", "tensor_axis": "tensor", "use_bias": True, "shared_intermediate_size": 4,
}  # fmt: skip


def make_mesh() -> jax.sharding.Mesh:
    return testing.mesh_of(testing.fit((2, 2, 2)), ("data", "expert", "tensor"))


def tokens() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (8, 3, HIDDEN))


def without(*names: str) -> tuple[Any, ...]:
    return tuple(rule for rule in RULES if rule[0] not in names)


class ShardingsTest(parameterized.TestCase):
    @parameterized.parameters(False, True)
    def test_weights_and_moments(self, is_scanned: bool):
        """A training state is made as MaxText makes it: by shardings of its abstract value."""
        module: Any = jax_ep.linen.MoE(*SIZES, logical_axes=NAMES, **OPTIONS)
        optimizer = optax.adam(1e-2)
        if is_scanned:
            module, lead = scanned(), (None,)
        else:
            lead = ()

        def make(key: jax.Array) -> Any:
            params = module.init(key, tokens(), *lead)["params"]
            return {"params": params, "moments": optimizer.init(params)}

        mesh = make_mesh()
        with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
            logical = nn.get_partition_spec(jax.eval_shape(make, jax.random.key(0)))
            shardings = nn.logical_to_mesh_sharding(logical, mesh, RULES)
            state = jax.jit(make, out_shardings=shardings)(jax.random.key(0))
            # A boxed tree, as a training step carries it.
            loss = lambda params: (module.apply({"params": params}, tokens(), *lead)[0] ** 2).sum()
            gradients = jax.jit(jax.grad(loss))(state["params"])
            step = jax.jit(lambda s, g: optimizer.update(g, s["moments"])[1], out_shardings=None)
            moments = step(state, gradients)
        for tree in state["params"], state["moments"][0].mu, moments[0].nu:
            tree = tree["moe"] if is_scanned else tree
            layer = lambda name, tree=tree: tree[name].unbox(apply_constraint=False)
            for name, spec in {
                "w_up": P(*lead, "expert", "data", None, "tensor"),
                "w_down": P(*lead, "expert", "tensor", "data"),
                "b_down": P(*lead, "expert"),
                "shared_w_up": P(*lead, "data", None, "tensor"),
            }.items():
                array = layer(name)
                wanted = jax.NamedSharding(mesh, spec)
                self.assertTrue(array.sharding.is_equivalent_to(wanted, array.ndim), name)
        self.assertEqual(
            layer("w_up").addressable_shards[0].data.size, layer("w_up").size // mesh.size
        )

    def test_same_numbers(self):
        plain, logical = (
            jax_ep.linen.MoE(*SIZES, logical_axes=names, **OPTIONS) for names in (None, NAMES)
        )
        with jax.set_mesh(make_mesh()), nn.logical_axis_rules((*RULES, ("expert", "expert"))):
            variables = logical.init(jax.random.key(0), tokens())
            got = logical.apply(variables, tokens())
        with jax.set_mesh(make_mesh()):
            expected = plain.init_with_output(jax.random.key(0), tokens())
        jax.tree.map(np.testing.assert_array_equal, nn.unbox(variables), nn.unbox(expected[1]))
        jax.tree.map(np.testing.assert_array_equal, got, expected[0])


def scanned() -> nn.Module:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, _: Any) -> Any:
            layer = jax_ep.linen.MoE(*SIZES, logical_axes=NAMES, **OPTIONS, name="moe")
            y, stats = layer(x)
            return x + y, stats.aux_loss

    return nn.scan(
        Block,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=2,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )()


class RulesTest(parameterized.TestCase):
    """Nothing is left whole on every device without a word."""

    def make(self, rules: Any, **options: Any) -> list[str]:
        layer = jax_ep.linen.MoE(*SIZES, **(OPTIONS | options))
        primitive._warned.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with jax.set_mesh(make_mesh()), nn.logical_axis_rules(rules):
                jax.eval_shape(layer.init, jax.random.key(0), tokens())
        return [str(w.message) for w in caught if "jax_ep" in str(w.message)]

    def test_rules_that_lose_an_axis(self):
        for rules, names, words in (
            (without("exp"), NAMES, "dimension 0 of w_up 'exp', .* over None; .* axis 'expert'"),
            (without("mlp"), NAMES, "dimension 3 of w_up 'mlp'"),
            ((("exp", "data"), *RULES), NAMES, "over 'data'; expected mesh axis 'expert'"),
            (
                RULES,
                {"experts": "exp", "hidden": "embed"},
                "no name for dimension 3 of w_up, .* Add 'hidden' or 'intermediate'",
            ),
        ):
            with self.subTest(words), self.assertRaisesRegex(errors.ArgumentError, words):
                self.make(rules, logical_axes=names)
        for names in {"hidden": "embed"}, {"experts": "exp", "heads": "x"}, ("exp", "embed"):
            with self.assertRaisesRegex(errors.ArgumentError, "expected a mapping from 'experts'"):
                self.make(RULES, logical_axes=names)

    def test_warnings(self):
        self.assertEqual(self.make(RULES, logical_axes=NAMES), [])
        self.assertEqual(self.make(()), [])
        (first, *_) = self.make((), logical_axes=NAMES)
        self.assertRegex(first, "without nn.logical_axis_rules in context")
        (first, *_) = self.make(RULES)
        self.assertRegex(first, "no rule for mesh axis 'expert', .* dimension 0 of w_up")
        more = ("exp", ("data", "expert")), *without("exp", "embed"), ("embed", None)
        (first, *_) = self.make(more, logical_axes=NAMES, fsdp_axis=None)
        self.assertRegex(first, "dimension 0 of w_up, 'exp', over mesh axis 'data' as well")
        itself = tuple((name, name) for name in ("expert", "data", "tensor"))
        self.assertEqual(self.make(itself), [])

    def test_a_module_with_names_is_a_static_argument(self):
        layers = [jax_ep.linen.MoE(*SIZES, logical_axes=dict(NAMES)) for _ in range(2)]
        self.assertEqual(*map(hash, layers))
        self.assertEqual(*layers)
        doubled = jax.jit(lambda layer, x: layer.top_k * x, static_argnums=0)
        self.assertEqual(doubled(layers[0], 1.0), 2.0)

    def test_names_of_all_parameters(self):
        options = OPTIONS | {"latent_size": 4, "shared_gate": True, "logits_bias": True}
        layer = jax_ep.linen.MoE(*SIZES, logical_axes=NAMES, **options)
        with jax.set_mesh(make_mesh()), nn.logical_axis_rules(RULES):
            made = jax.eval_shape(layer.init, jax.random.key(0), tokens())["params"]
        expected = {
            "router_kernel": P(None, None),
            "w_up": P("exp", "embed", None, "mlp"),
            "w_down": P("exp", "mlp", "embed"),
            "b_up": P("exp", None, "mlp"),
            "b_down": P("exp", None),
            "latent_in": P("embed", None),
            "latent_out": P(None, "embed"),
            "shared_w_up": P("embed", None, "mlp"),
            "shared_w_down": P("mlp", "embed"),
            "shared_gate": P(None, None),
            "logits_bias": P(),
        }
        self.assertEqual(nn.get_partition_spec(made), expected)


if __name__ == "__main__":
    absltest.main()
