"""examples/finetune.py: that it learns, that a saved run goes on over other devices, and what it writes."""

from __future__ import annotations

import functools
import pathlib
import sys
import tempfile
from unittest import mock

import testing  # isort: skip

import jax
import numpy as np
from absl.testing import absltest, parameterized

from jax_ep import checkpoints

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import finetune  # noqa: E402
from checkpoint_models import lora  # noqa: E402
from checkpoint_models import model as models  # noqa: E402
from run_checkpoints import Checkpoints  # noqa: E402

FOLDER = pathlib.Path(__file__).parents[1] / "data" / "checkpoints"
LENGTH, BATCH, STEPS = 8, 8, 6


def load(family, num_devices):
    mesh = testing.expert_mesh(num_devices)
    return models.load(FOLDER / family, mesh, experts_fn=lora.experts, remat="experts")


def batch(index):
    return np.random.default_rng((1, index % 2)).integers(0, 128, (BATCH, LENGTH + 1), np.int32)


def run(family, num_devices, num_steps, folder=None):
    """Trains, saving every third step, and returns model, params, checkpoint, state and losses."""
    model, params, loaded = load(family, num_devices)
    training = finetune.make_training(model, params, rank=2, learning_rate=3e-2, seed=0)
    saved = Checkpoints(folder, 3, {})
    state, history = finetune.train(model, params, training, batch, num_steps, saved)
    saved.close()
    return model, params, loaded, state, history.losses


class FinetuneTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        *_, cls.whole = run("olmoe", 8, STEPS)
        *_, cls.state, cls.first = run("olmoe", 8, 3, cls.folder)

    def test_it_learns(self):
        self.assertLess(self.whole[-1], self.whole[0] - 0.1)
        self.assertEqual(self.whole[:3], self.first)

    @parameterized.parameters(4, 1)
    def test_goes_on_over_other_devices(self, num_devices):
        model, params, _ = load("olmoe", num_devices)
        fresh, _ = finetune.make_training(model, params, rank=2, learning_rate=3e-2, seed=1)
        saved = Checkpoints(self.folder, 100, {})
        self.addCleanup(saved.close)
        state, history = saved.restore_newest(fresh, finetune.History())
        self.assertEqual(history.losses, self.first)
        for found, expected in zip(*map(jax.tree.leaves, (state, self.state)), strict=True):
            np.testing.assert_array_equal(found, expected)
            self.assertEqual(found.sharding.num_devices, num_devices)
        *_, losses = run("olmoe", num_devices, STEPS, self.folder)
        np.testing.assert_allclose(losses, self.whole, rtol=1e-5)


class MergeTest(parameterized.TestCase):
    @parameterized.parameters("qwen3_moe", "olmoe", "mixtral")
    def test_the_tuned_checkpoint_computes_the_same(self, family):
        """Six experts on four devices, too, where rows of padding follow them."""
        model, params, loaded, state, _ = run(family, 4, 2)
        with tempfile.TemporaryDirectory() as folder:
            checkpoints.save(folder, lora.merge(loaded, state.adapters))
            tuned, tuned_params, _ = models.load(pathlib.Path(folder), model.mesh)
        windows = batch(0)
        adapted, plain, merged = (
            jax.jit(functools.partial(finetune.losses, of))(given, adapters, windows)[0]
            for of, given, adapters in (
                (model, params, state.adapters),
                (tuned, params, None),
                (tuned, tuned_params, None),
            )
        )
        np.testing.assert_allclose(merged, adapted, rtol=1e-5)
        self.assertGreater(abs(plain - adapted), 1e-3)

    def test_other_experts(self):
        with self.assertRaisesRegex(ValueError, "have biases or eight bits; expected"):
            lora.make_adapters(*load("gpt_oss", 4)[:2], 2, 0)


class CommandTest(absltest.TestCase):
    def test_small_model(self):
        with tempfile.TemporaryDirectory() as parent:
            text, output = pathlib.Path(parent, "text"), pathlib.Path(parent, "tuned")
            text.write_text("again and " * 50)
            options = [f"--text={text}", f"--output={output}", "--steps=2", "--length=16"]
            with (
                mock.patch.object(sys, "argv", ["finetune.py", "--batch-size=4", *options]),
                mock.patch.object(finetune, "make_mesh", lambda count: testing.expert_mesh(2)),
            ):
                finetune.main()
            self.assertTrue((output / "model.safetensors.index.json").exists())


if __name__ == "__main__":
    absltest.main()
