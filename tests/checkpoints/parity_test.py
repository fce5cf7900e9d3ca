"""Layers that are loaded from checkpoints of transformers, against what torch computed from the same files."""

from __future__ import annotations

import pathlib

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx

import jax_ep.linen
import jax_ep.nnx
from jax_ep import checkpoints
from jax_ep._src.checkpoints.tensors import Tensors

FOLDER = pathlib.Path(__file__).parents[1] / "data" / "checkpoints"
FAMILIES = sorted(path.name for path in FOLDER.iterdir())
RANKS = min(4, testing.NUM_DEVICES)
TOLERANCE = 5e-6  # relative to the largest magnitude


def recorded(family):
    """{layer: {"x", "y", "dy", "dx"}} of the blocks that torch ran."""
    tensors = Tensors(FOLDER / family, "block.safetensors")
    found: dict[int, dict[str, np.ndarray]] = {}
    for name in tensors:
        kind, _, layer = name.partition(".")
        if layer:
            found.setdefault(int(layer), {})[kind] = tensors.view(name)
    return found


def load(family, mesh, part=""):
    return checkpoints.load(
        FOLDER / family / part,
        mesh=mesh,
        dtype=jnp.float32,
        dequantize=True,
        other=lambda name, shape: None,
    )


def options(family, mesh):
    floats = {"param_dtype": jnp.float32, "dtype": jnp.float32}
    return checkpoints.moe_options(FOLDER / family, dequantize=True) | floats | {"mesh": mesh}


class ParityTest(parameterized.TestCase):
    def assert_near(self, given, expected, name):
        given, expected = np.asarray(given, np.float32), np.asarray(expected, np.float32)
        self.assertEqual(given.shape, expected.shape, name)
        error = np.abs(given - expected).max() / np.abs(expected).max()
        self.assertLessEqual(error, TOLERANCE, name)

    @parameterized.parameters(*FAMILIES)
    def test_nnx(self, family):
        mesh = testing.expert_mesh(RANKS)
        loaded, expected = load(family, mesh), load(family, mesh, "gradients")
        made = nnx.eval_shape(
            lambda: jax_ep.nnx.MoE(**options(family, mesh), rngs=nnx.Rngs(0)), graph=True
        )

        @jax.jit
        def run(params, x, dy):
            def apply(params, x):
                layer = nnx.clone(made)
                nnx.update(layer, params)
                return layer(x)[0]

            y, pull = jax.vjp(apply, params, x)
            return y, *pull(dy)

        blocks = recorded(family)
        self.assertEqual((*blocks,), loaded.layer_indices)
        for i, block in blocks.items():
            y, gradients, dx = run(loaded.layers[i], block["x"], block["dy"])
            self.assert_near(y, block["y"], "y")
            self.assert_near(dx, block["dx"], "dx")
            for name, gradient in gradients.items():
                if name != "selection_bias":
                    self.assert_near(gradient, expected.layers[i][name], name)

    def test_four_bits_stay(self):
        """The layer of a checkpoint in MXFP4 has the numbers of one that is dequantized when loaded."""
        folder, mesh = FOLDER / "gpt_oss_mxfp4", testing.expert_mesh(RANKS)
        kept = checkpoints.load(folder, mesh=mesh)
        up, down = (one.forward for one in kept.quantized[0])
        self.assertEqual((up.shape, down.shape), ((4, 64, 32), (4, 32, 32)))
        floats = {"param_dtype": jnp.float32, "dtype": jnp.float32, "mesh": mesh}
        layer = jax_ep.linen.MoE(**checkpoints.moe_options(folder) | floats)
        apply = jax.jit(lambda *args, **options: layer.apply(*args, **options)[0])
        x = recorded("gpt_oss_mxfp4")[0]["x"]
        variables = checkpoints.linen_variables(kept.layers[0])
        y = apply(variables, x, quantized_weights=kept.quantized[0])
        self.assert_near(y, recorded("gpt_oss_mxfp4")[0]["y"], "y")

    @parameterized.parameters("deepseek_v3", "qwen2_moe")
    def test_linen(self, family):
        mesh = testing.expert_mesh(RANKS)
        layer = jax_ep.linen.MoE(**options(family, mesh))
        for i, block in recorded(family).items():
            variables = checkpoints.linen_variables(load(family, mesh).layers[i])
            y, _ = jax.jit(layer.apply)(variables, block["x"])
            self.assert_near(y, block["y"], "y")


if __name__ == "__main__":
    absltest.main()
