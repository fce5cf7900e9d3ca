"""The pytrees of arrays: compared by identity, and saved by Flax as state dicts."""

from __future__ import annotations

import subprocess
import sys

import testing  # isort: skip

import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized
from flax import serialization

import jax_ep
from jax_ep import quant

ROWS = quant.Recipe(quant.Fp8Row(), quant.Fp8Row(jnp.float8_e5m2))


def values(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def quantized_experts(recipe, seed=0):
    return quant.quantize_experts(values(seed, 2, 160, 2, 128), values(seed, 2, 128, 160), recipe)


def stats_of(seed):
    return jax_ep.Stats(*(jnp.full(3, seed + i) for i in range(5)))


def trees():
    rows = quant.quantize(values(0, 3, 256), quant.Fp8Row(jnp.float8_e5m2))
    stats = jax_ep.nnx.MoEStats(*(jnp.zeros(()) for _ in range(4)))
    return rows, *quantized_experts(quant.Recipe()), stats_of(0), stats


class IdentityTest(absltest.TestCase):
    def test_equal_is_the_same(self):
        for tree in trees():
            copy = jax.tree.map(jnp.copy, tree)
            self.assertEqual(tree, tree)
            self.assertNotEqual(tree, copy)
            self.assertLen({tree, copy, tree}, 2)
            self.assertIn(tree, [copy, tree])
            self.assertEqual(jax.tree.structure(tree), jax.tree.structure(copy))


class StateDictTest(parameterized.TestCase):
    @parameterized.parameters(
        lambda seed: quantized_experts(quant.Recipe(), seed),
        lambda seed: quantized_experts(ROWS, seed),
        lambda seed: [quant.QuantizedWeights(one.forward) for one in quantized_experts(ROWS, seed)],
        lambda seed: {"rows": quant.quantize(values(seed, 3, 256), ROWS.cotangents)},
        lambda seed: quant.quantize(values(seed, 3, 256), quant.NvFp4()),
        lambda seed: stats_of(seed),
    )
    def test_bytes(self, make):
        saved, target = make(1), make(2)
        restored = serialization.from_bytes(target, serialization.to_bytes(saved))
        self.assertEqual(jax.tree.structure(restored), jax.tree.structure(saved))
        for a, b in zip(*map(jax.tree.leaves, (restored, saved)), strict=True):
            self.assertEqual(a.dtype, b.dtype)
            testing.assert_bitwise(a, b)

    def test_a_state_dict_has_arrays_alone(self):
        state = serialization.to_state_dict(quantized_experts(ROWS))
        self.assertEqual(set(state["0"]["forward"]), {"values", "scales"})
        state_of_tensor = serialization.to_state_dict(
            quant.quantize(values(0, 3, 16), quant.NvFp4())
        )
        self.assertEqual(set(state_of_tensor), {"values", "scales", "tensor_scale"})
        jax.tree.map(lambda leaf: self.assertIsInstance(leaf, jax.Array), state)
        self.assertEqual(state["1"]["backward"]["values"].dtype, jnp.float8_e4m3fn)

    def test_whichever_is_imported_first(self):
        check = "serialization.to_state_dict(quant.Quantized(1, 2, None))['values']"
        for imports in (
            "from flax import serialization; from jax_ep import quant",
            "from jax_ep import nnx, quant; from flax import serialization",
            "from jax_ep import linen, quant; from flax import serialization",
        ):
            command = [sys.executable, "-P", "-c", f"{imports}; {check}"]
            subprocess.run(command, check=True, timeout=120)
        code = "import sys, jax_ep; assert 'flax' not in sys.modules"
        subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=120)


if __name__ == "__main__":
    absltest.main()
