"""Expert blocks of MaxText: what its dense path computes from them, and conversions there and back."""

from __future__ import annotations

import pathlib

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import linen as nn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep.linen
from jax_ep import checkpoints

FOLDER = pathlib.Path(__file__).parents[1] / "data" / "checkpoints"
# With gpt-oss's biases, DeepSeek-V3's shared experts and bias, and Qwen3-Next's gate for shared experts.
FAMILIES = "mixtral", "deepseek_v3", "gpt_oss", "qwen3_next"
E, H, F, TOP_K = 8, 16, 24, 2


def random_block(seed, lead=()):
    """RoutedMoE as MaxText makes it; `lead` is of the layers, the second dimension of each array."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.standard_normal((shape[0], *lead, *shape[1:]), np.float32) / shape[-2] ** 0.5

    return {
        "gate": {"kernel": draw(H, E)},
        "wi_0": draw(E, H, F),
        "wi_1": draw(E, H, F),
        "wo": draw(E, F, H),
    }


def dense_path(block, x):
    """MaxText's `dense_matmul` for Mixtral, with sparse_matmul=False and capacity_factor=-1, in float64."""
    logits = x @ block["gate"]["kernel"]
    chosen = np.argsort(-logits, axis=-1)[:, :TOP_K]
    weights = np.exp(np.take_along_axis(logits, chosen, -1))
    weights /= weights.sum(-1, keepdims=True)
    gate = np.einsum("BM,EMH->BEH", x, block["wi_0"])
    up = np.einsum("BM,EMH->BEH", x, block["wi_1"])
    out = np.einsum("BEH,EHM->BEM", gate / (1 + np.exp(-gate)) * up, block["wo"])
    of_all = np.zeros(logits.shape)
    np.put_along_axis(of_all, chosen, weights, -1)
    return np.einsum("BEM,BE->BM", out, of_all)


def layer(mesh):
    sizes = {"hidden_size": H, "intermediate_size": F, "num_experts": E, "top_k": TOP_K}
    return jax_ep.linen.MoE(**sizes, mesh=mesh)


def names(tree):
    return [
        "/".join(str(key.key) for key in path) for path, _ in jax.tree.flatten_with_path(tree)[0]
    ]


class LayerTest(parameterized.TestCase):
    @parameterized.parameters(False, True)
    def test_computes_what_maxtext_does(self, is_fused):
        mesh = testing.expert_mesh(4)
        block = random_block(0)
        x = np.random.default_rng(1).standard_normal((12, H))
        expected = dense_path(block, x)
        if is_fused:  # prefuse_moe_weights
            block["wi"] = np.concatenate((block.pop("wi_0"), block.pop("wi_1")), -1)
        variables = checkpoints.linen_variables(checkpoints.from_maxtext(block))
        with jax.default_matmul_precision("float32"):
            y, _ = jax.jit(layer(mesh).apply)(variables, jnp.asarray(x, jnp.float32))
        np.testing.assert_allclose(y, expected, atol=1e-5 * np.abs(expected).max())

    def test_layers_of_a_scan(self):
        """Each layer of a scanned block is that layer's own block."""
        stacked = random_block(2, lead=(3,))
        self.assertEqual(stacked["wi_0"].shape, (E, 3, H, F))
        params = checkpoints.from_maxtext(stacked, scan_axis=1)
        self.assertEqual(params["w_up"].shape, (3, E, H, 2, F))
        for i in range(3):
            one = checkpoints.from_maxtext(jax.tree.map(lambda a, i=i: a[:, i], stacked))
            for name, array in one.items():
                np.testing.assert_array_equal(params[name][i], array, name)

    def test_layers_where_maxtext_has_them(self):
        """For a linen model that scans with params at axis 1; also its boxes."""
        stacked = random_block(2, lead=(3,))
        boxed = jax.tree.map(lambda a: nn.LogicallyPartitioned(a, (None,) * a.ndim), stacked)
        params = checkpoints.from_maxtext(boxed, scan_axis=1, layer_axis=1)
        for name, array in checkpoints.from_maxtext(stacked, scan_axis=1).items():
            np.testing.assert_array_equal(jnp.moveaxis(params[name], 1, 0), array, name)
        again = checkpoints.to_maxtext(params, scan_axis=1, layer_axis=1)
        jax.tree.map(np.testing.assert_array_equal, again, stacked)

    def test_is_placed_by_jit(self):
        mesh = testing.expert_mesh(4)
        of_experts = NamedSharding(mesh, P("expert"))
        shardings = {
            "router_kernel": NamedSharding(mesh, P()),
            "w_up": of_experts,
            "w_down": of_experts,
        }
        params = jax.jit(checkpoints.from_maxtext, out_shardings=shardings)(random_block(3))
        self.assertEqual(params["w_up"].addressable_shards[0].data.shape, (E // 4, H, 2, F))


class RoundTripTest(parameterized.TestCase):
    @parameterized.product(family=FAMILIES, scan_axis=[None, 0, 1])
    def test_from_a_checkpoint_and_back(self, family, scan_axis):
        loaded = checkpoints.load(FOLDER / family, stacked=scan_axis is not None, dequantize=True)
        params = loaded.layers[loaded.layer_indices[0]]
        block = checkpoints.to_maxtext(params, scan_axis=scan_axis)
        bias = "logits_bias" if "logits_bias" in params else "selection_bias"
        again = checkpoints.from_maxtext(block, scan_axis=scan_axis, gate_bias=bias)
        self.assertEqual(sorted(params), sorted(again))
        for name, array in params.items():
            testing.assert_bitwise(again[name], array, name)

    def test_names(self):
        def of(family):
            params = checkpoints.load(FOLDER / family, dequantize=True)
            return names(checkpoints.to_maxtext(params.layers[params.layer_indices[0]]))

        routed = ["gate/kernel", "wi_0", "wi_1", "wo"]
        self.assertEqual(of("mixtral"), routed)
        biased = [
            "gate/bias",
            "gate/kernel",
            "wi_0",
            "wi_0_bias",
            "wi_1",
            "wi_1_bias",
            "wo",
            "wo_bias",
        ]
        self.assertEqual(of("gpt_oss"), biased)
        kernels = [f"{name}/kernel" for name in ("wi_0", "wi_1", "wo")]
        self.assertEqual(
            of("deepseek_v3"),
            [f"MoeBlock_0/{name}" for name in ("gate/bias", *routed)]
            + [f"shared_experts/{name}" for name in kernels],
        )
        self.assertEqual(
            of("qwen3_next"),
            [f"routed_experts/{name}" for name in routed]
            + [f"shared_expert/{name}" for name in kernels]
            + ["shared_expert_gate/kernel"],
        )


class ErrorsTest(absltest.TestCase):
    def test_another_scan_axis(self):
        stacked, one = random_block(2, lead=(3,)), random_block(0)
        for block, scan_axis in (stacked, None), (stacked, 0), (stacked, 2), (one, 0), (one, 1):
            with self.assertRaisesRegex(ValueError, f"would have .* scan_axis is {scan_axis}"):
                checkpoints.from_maxtext(block, scan_axis=scan_axis)
        params = checkpoints.from_maxtext(stacked, scan_axis=1)
        for scan_axis, layer_axis in (None, 0), (1, 1):
            with self.assertRaisesRegex(ValueError, "would have the shape"):
                checkpoints.to_maxtext(params, scan_axis=scan_axis, layer_axis=layer_axis)

    def test_missing_and_unknown_arrays(self):
        block = random_block(0)
        with self.assertRaisesRegex(
            ValueError, r"'wi_1' is missing among \['gate', 'wi_0', 'wo'\]"
        ):
            checkpoints.from_maxtext({name: a for name, a in block.items() if name != "wi_1"})
        with self.assertRaisesRegex(ValueError, r"\['per_expert_scale'\] among .* no counterpart"):
            checkpoints.from_maxtext(block | {"per_expert_scale": np.ones(E)})
        with self.assertRaisesRegex(ValueError, r"a block of MaxText has \['MoeBlock_0', 'mlp'\]"):
            checkpoints.from_maxtext({"MoeBlock_0": block, "mlp": {}})
        with self.assertRaisesRegex(ValueError, "gate_bias='bias'; expected one of"):
            checkpoints.from_maxtext(block, gate_bias="bias")
        shared = {name: {"kernel": block[name][0]} for name in ("wi_0", "wi_1", "wo")}
        for name in shared:
            biased = shared | {name: shared[name] | {"bias": np.ones(F)}}
            with self.assertRaisesRegex(ValueError, r"\['bias'\] among .* no counterpart"):
                checkpoints.from_maxtext({"MoeBlock_0": block, "shared_experts": biased})
        params = checkpoints.from_maxtext(block)
        with self.assertRaisesRegex(ValueError, r"\['latent_in'\] among .* no counterpart"):
            checkpoints.to_maxtext(params | {"latent_in": jnp.ones((H, H))})
        del params["w_down"]
        with self.assertRaisesRegex(ValueError, "'w_down' is missing among"):
            checkpoints.to_maxtext(params)


if __name__ == "__main__":
    absltest.main()
