"""examples/finetune.py: that it learns, that a saved run goes on over other devices, and what it writes."""

from __future__ import annotations

import functools
import pathlib
import sys
import tempfile
from unittest import mock

import testing  # isort: skip

import jax
import jax.numpy as jnp
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
OPTIONS = {"rank": 2, "learning_rate": 3e-2, "seed": 0}


def load(family, num_devices):
    mesh = testing.expert_mesh(num_devices)
    return models.load(FOLDER / family, mesh, experts_fn=lora.experts, remat="experts")


def batch(index):
    return np.random.default_rng((1, index % 2)).integers(0, 128, (BATCH, LENGTH + 1), np.int32)


@functools.cache
def program(num_devices):
    """Returns model, params and step, of one layer, which compiles in half the time."""
    model, params, _ = load("olmoe", num_devices)
    model.num_layers = 1
    params = params._replace(experts={0: params.experts[0]})
    return model, params, finetune.make_training(model, params, **OPTIONS)[1]


def run(num_devices, num_steps, folder=None, *, every=100):
    """Returns state and losses of a run, which goes on from the newest state in the folder."""
    model, params, step = program(num_devices)
    state, _ = finetune.make_training(model, params, **OPTIONS)
    saved = Checkpoints(folder, every, {})
    state, history = finetune.train(model, params, (state, step), batch, num_steps, saved)
    saved.close()
    return state, history.losses


class FinetuneTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        _, cls.whole = run(8, STEPS)
        cls.state, cls.first = run(8, 3, cls.folder, every=3)

    def test_it_learns(self):
        self.assertLess(self.whole[-1], self.whole[0] - 0.1)
        self.assertEqual(self.whole[:3], self.first)

    @parameterized.parameters(4, 1)
    def test_goes_on_over_other_devices(self, num_devices):
        restored, first = run(num_devices, 3, self.folder)
        self.assertEqual(first, self.first)
        for found, expected in zip(*map(jax.tree.leaves, (restored, self.state)), strict=True):
            np.testing.assert_array_equal(found, expected)
            self.assertEqual(found.sharding.num_devices, num_devices)
        _, losses = run(num_devices, STEPS, self.folder)
        np.testing.assert_allclose(losses, self.whole, rtol=1e-5)


class MergeTest(parameterized.TestCase):
    @parameterized.parameters(("olmoe", 1), ("qwen3_moe", 4), ("mixtral", 1))
    def test_the_tuned_checkpoint_computes_the_same(self, family, num_devices):
        """Six experts on four devices, too, where rows of padding follow them."""
        model, params, loaded = load(family, num_devices)
        adapters = lora.make_adapters(model, params, 2, 0)
        adapters = jax.tree.map(lambda a: jnp.where(a == 0, 0.1, a), adapters)
        with tempfile.TemporaryDirectory() as folder:
            checkpoints.save(folder, lora.merge(loaded, adapters))
            tuned, tuned_params, _ = models.load(pathlib.Path(folder), model.mesh)
        adapted = jax.jit(functools.partial(finetune.losses, model))
        plain = jax.jit(lambda params: finetune.losses(tuned, params, None, batch(0))[0])
        loss, _ = adapted(params, adapters, batch(0))
        np.testing.assert_allclose(plain(tuned_params), loss, rtol=1e-5)
        self.assertGreater(abs(plain(params) - loss), 1e-3)

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
