"""The OLMoE example: its sizes, its optimizer, and small runs on a CPU."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
import optax
import unspecified_rows
from absl.testing import absltest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import olmoe_layers  # noqa: E402
import olmoe_model  # noqa: E402
import olmoe_optimizer  # noqa: E402
import olmoe_report  # noqa: E402


def problem():
    """x, ids, weights, w_up, w_down, of all ranks."""
    random = np.random.default_rng(0)
    x, w_up, w_down = (
        random.normal(size=s).astype(np.float32) for s in ((32, 8), (8, 8, 12), (8, 6, 8))
    )
    ids = np.argsort(random.random((32, 8)), axis=1)[:, :2].astype(np.int32)
    return x, ids, random.random((32, 2)).astype(np.float32), w_up, w_down


class ModelTest(absltest.TestCase):
    def test_number_of_parameters(self):
        self.assertEqual(round(olmoe_model.num_parameters(olmoe_model.Sizes()) / 1e7), 692)

    def test_layers_agree_on_several_ranks(self):
        """Dropless on one rank and on two, with the capacity that four ranks leave."""
        results = [
            jax.jit(olmoe_layers.sharded(layer, testing.expert_mesh(ranks)))(*problem())
            for ranks in (1, 2, 4)
            for layer in (olmoe_layers.Ours(), olmoe_layers.plain(jax.lax.ragged_dot))
        ]
        for result in results[1:]:
            np.testing.assert_allclose(result, results[0], rtol=1e-4, atol=1e-4)

    def test_unspecified_rows(self):
        """Rows past the last group, NaN in a matmul's results and gradients, reach no gradient."""
        x, ids, weights, w_up, w_down = problem()

        def gradients(layer):
            mapped = olmoe_layers.sharded(layer, testing.expert_mesh(2))

            def loss(x, weights, w_up, w_down):
                return jnp.square(mapped(x, ids, weights, w_up, w_down)).sum()

            return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(x, weights, w_up, w_down)

        layer = olmoe_layers.plain(unspecified_rows.ragged_dot)
        for found, expected in zip(gradients(layer), gradients(olmoe_layers.Ours()), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


class OptimizerTest(absltest.TestCase):
    def test_is_adafactor(self):
        rate = 0.01
        reference = optax.adafactor(
            rate,
            min_dim_size_to_factor=1,
            multiply_by_parameter_scale=False,
            clipping_threshold=1.0,
        )

        def unstacked(tree):
            return {"matrices": list(tree["matrices"]), "vector": tree["vector"]}

        random = np.random.default_rng(0)
        params = {"matrices": jnp.ones((2, 5, 7)), "vector": jnp.ones(4)}
        expected, state = unstacked(params), olmoe_optimizer.initialize(params)
        reference_state = reference.init(expected)
        for step in range(4):
            # Gradients that grow are clipped; the two matrices are clipped apart.
            growth = {"matrices": np.array([1, 4**step]).reshape(2, 1, 1), "vector": 4**step}
            gradients = jax.tree.map(
                lambda p, g: jnp.float32(g * random.normal(size=p.shape)), params, growth
            )
            params, state = olmoe_optimizer.update(params, gradients, state, jnp.int32(step), rate)
            updates, reference_state = reference.update(
                unstacked(gradients), reference_state, expected
            )
            expected = optax.apply_updates(expected, updates)
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
                unstacked(params),
                expected,
            )

    def test_rounding_is_unbiased(self):
        """The mean of many roundings is the value, and only its neighbors occur."""
        ulp = 2.0**-13  # of bfloat16 near 0.02
        low = 0.02 // ulp * ulp
        number = 1 << 16
        for sign in (1, -1):
            for fraction in (0.0, 0.1, 0.5, 0.9):
                value = sign * (low + fraction * ulp)
                rounded = olmoe_optimizer.round_stochastically(
                    jnp.full((4, number // 4), value, jnp.float32), jnp.uint32(3)
                )
                up = (np.abs(np.asarray(rounded, np.float64)) - low) / ulp
                self.assertContainsSubset(np.unique(up), (0.0, 1.0))
                deviation = np.sqrt(fraction * (1 - fraction) / number)
                self.assertLessEqual(abs(up.mean() - fraction), 5 * deviation + 2**-16)

    def test_rounding_keeps_what_is_not_finite(self):
        bits = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800000, 0xFF800000], np.uint32)
        values = bits.view(np.float32)
        rounded = olmoe_optimizer.round_stochastically(jnp.asarray(values), jnp.uint32(0))
        np.testing.assert_array_equal(np.asarray(rounded, np.float32), values)

    def test_steps_round_alike_only_if_they_are_the_same(self):
        params = {name: jnp.full((40, 50), 0.02, jnp.bfloat16) for name in "ab"}
        gradients = jax.tree.map(jnp.ones_like, params)
        state = olmoe_optimizer.initialize(params)
        first, again, other = (
            jax.jit(olmoe_optimizer.update)(params, gradients, state, jnp.int32(step), 5e-5)[0]
            for step in (1, 1, 2)
        )
        np.testing.assert_array_equal(first["a"], again["a"])
        self.assertTrue((first["a"] != other["a"]).any())
        self.assertTrue((first["a"] != first["b"]).any())
        self.assertTrue((first["a"] == params["a"]).any())  # less than half an ulp

    def test_state_is_small(self):
        (moments,) = jax.tree.leaves(
            olmoe_optimizer.initialize([jnp.zeros((3, 40, 50), jnp.bfloat16)]),
            is_leaf=lambda a: isinstance(a, olmoe_optimizer.Moments),
        )
        self.assertEqual((moments.rows.shape, moments.columns.shape), ((3, 40), (3, 50)))


class ReportTest(absltest.TestCase):
    def test_nan_does_not_coincide(self):
        runs = [
            olmoe_report.Run(name, "a device", 8, 0.0, losses, [1.0] * 12)
            for name, losses in (("a", [3.0] * 12), ("b", [3.0] * 4 + [float("nan")] * 8))
        ]
        self.assertEqual(olmoe_report.largest_difference(runs), float("inf"))

    def test_difference(self):
        runs = [
            olmoe_report.Run(name, "a device", 8, 0.0, losses, [1.0] * len(losses))
            for name, losses in (
                ("a", [1.0] * 30),
                ("b", [1.5] * 5 + [0.5] * 5 + [1.25] * 20),
                ("c", [1.0]),
            )
        ]
        self.assertAlmostEqual(
            olmoe_report.largest_difference(runs), 0.5
        )  # b and c; the mean of one
        self.assertAlmostEqual(olmoe_report.largest_difference(runs[:2]), 0.25)
        self.assertEqual(olmoe_report.largest_difference(runs[:1]), 0)


class RunTest(absltest.TestCase):
    """Small runs, in processes of their own."""

    def run_small(self, folder, *arguments):
        command = [
            sys.executable,
            str(EXAMPLES / "olmoe.py"),
            "--small",
            "--output",
            folder,
            *arguments,
        ]
        environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        return subprocess.run(
            command,
            env=environment | {"JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=300,
        )

    def test_losses_coincide(self):
        """Also with experts over two devices, for the same batches."""
        common = ("--steps", "4", "--length", "32", "--learning-rate", "1e-3", "--warm-up", "50")
        losses = {}
        for devices, batch, names in (
            ("1", "4", ("jax_ep", "ragged_dot")),
            ("2", "2", ("jax_ep",)),
        ):
            with tempfile.TemporaryDirectory() as folder:
                result = self.run_small(
                    *(folder, *common, "--expert-parallel", devices, "--batch-size", batch),
                    *("--layers", *names),
                )
                self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
                if len(names) == 2:
                    self.assertIn("losses of 2 layers", result.stdout)
                    self.assertIn("they coincide", result.stdout)
                self.assertTrue(
                    pathlib.Path(folder, "olmoe.png").read_bytes().startswith(b"\x89PNG")
                )
                for name in names:
                    run = json.loads(pathlib.Path(folder, f"{name}.json").read_text())
                    losses[name, devices] = run["losses"]
        first, *others = losses.values()
        self.assertLen(first, 4)
        self.assertLess(first[-1], first[0])
        for other in others:
            np.testing.assert_allclose(other, first, rtol=2e-3)

    def test_what_is_missing(self):
        with tempfile.TemporaryDirectory() as folder:
            result = self.run_small(
                folder, "--expert-parallel", "2", "--layers", "tokamax", "--steps", "1"
            )
            if "tokamax did not run" in result.stdout:
                self.assertEqual(result.returncode, 1)
                self.assertIn("No module named 'tokamax'", result.stdout)


if __name__ == "__main__":
    absltest.main()
