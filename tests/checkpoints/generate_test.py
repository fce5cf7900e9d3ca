"""examples/generate.py against the tokens and logits of torch, and its slots against each other."""

from __future__ import annotations

import contextlib
import functools
import io
import pathlib
import re
import sys
import tempfile
from unittest import mock

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from jax_ep import checkpoints
from jax_ep._src.checkpoints.tensors import Tensors

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import generate  # noqa: E402
from checkpoint_models import attention, text  # noqa: E402
from checkpoint_models import model as models  # noqa: E402

FOLDER = pathlib.Path(__file__).parents[1] / "data" / "checkpoints"
FAMILIES = ("gpt_oss", "mixtral", "qwen3_moe", "olmoe")
TOLERANCE = 2e-5  # relative to the largest magnitude
NEW = 64


@functools.cache
def load(family, num_devices):
    return models.load(FOLDER / family, testing.expert_mesh(num_devices))[:2]


def recorded(family, name):
    return Tensors(FOLDER / family, "block.safetensors").view(name)


class ParityTest(parameterized.TestCase):
    @parameterized.product(num_devices=(4, 1), family=FAMILIES)
    def test_greedy_tokens(self, num_devices, family):
        tokens = recorded(family, "tokens").tolist()
        prompts = [row[:-NEW] for row in tokens]
        made = generate.Generator(*load(family, num_devices), batch_size=4, length=len(tokens[0]))
        self.assertEqual(made(prompts, NEW), [row[-NEW:] for row in tokens])
        self.assertEqual(made.decode.tokens, len(tokens) * (NEW - 1))
        for program in made.programs.values():  # only the layers communicate
            for line in re.findall(r".* all-[\w-]+\(.*", program.as_text()):
                self.assertIn("/jax_ep.moe_mlp/", line)

    @parameterized.product(num_devices=(4, 1), family=FAMILIES)
    def test_teacher_forced_logits(self, num_devices, family):
        model, params = load(family, num_devices)
        tokens, expected = recorded(family, "tokens"), recorded(family, "logits")
        tokens = np.concatenate([tokens, tokens])
        positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
        run = jax.jit(lambda *args: model.logits(args[0], model(*args)[0]))
        logits = run(params, tokens, positions)[: len(expected)]
        error = np.abs(logits - expected).max() / np.abs(expected).max()
        self.assertLessEqual(error, TOLERANCE)


class ConfigTest(absltest.TestCase):
    def test_matrices_in_blocks(self):
        values = jnp.arange(-8, 8, dtype=jnp.float8_e4m3fn)[None].repeat(130, 0)
        other = {"a.weight": values, "a.weight_scale_inv": jnp.array([[0.5], [2.0]]), "b": values}
        found = models.dequantized(other)
        self.assertEqual({*found}, {"a.weight", "b"})
        expected = np.arange(-8, 8) * np.where(np.arange(130) < 128, 0.5, 2.0)[:, None]
        np.testing.assert_array_equal(found["a.weight"].astype(np.float32), expected)

    def test_windows(self):
        mesh = testing.expert_mesh(1)
        configs = {f: checkpoints.load(FOLDER / f, other=lambda *_: None).config for f in FAMILIES}

        def windows(family, **changes):
            config = {k: v for k, v in (configs[family] | changes).items() if v is not None}
            return [models.CheckpointModel(config, mesh).window(i) for i in range(2)]

        self.assertEqual(windows("mixtral"), [16, 16])
        self.assertEqual(windows("gpt_oss", layer_types=None), [16, None])
        self.assertEqual(windows("qwen3_moe", sliding_window=8), [None, None])
        self.assertEqual(windows("qwen3_moe", sliding_window=8, use_sliding_window=True), [8, 8])

    def test_unknown(self):
        with self.assertRaisesRegex(ValueError, "'Other' has no attention here; expected one of"):
            models.CheckpointModel({"architectures": ["Other"]}, testing.expert_mesh(1))
        with self.assertRaisesRegex(ValueError, "of the kind 'linear'; expected 'default' or"):
            attention.make_rope({"rope_scaling": {"type": "linear", "factor": 2}}, 8)


class SlotsTest(parameterized.TestCase):
    @parameterized.parameters(1, 4)
    def test_each_prompt_gets_what_it_gets_alone(self, num_devices):
        """Six prompts, some longer than a step, take turns in four slots, and stop at different times."""
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, 128, n).tolist() for n in (5, 3, 7, 20, 8, 4)]
        made = generate.Generator(*load("gpt_oss", num_devices), batch_size=4, length=32, chunk=4)
        alone = [made([prompt], 10)[0] for prompt in prompts]
        made.stop = [alone[0][2], alone[4][5]]
        expected = [
            result[: next((n + 1 for n, t in enumerate(result) if t in made.stop), 10)]
            for result in alone
        ]
        self.assertGreater(len({len(result) for result in expected}), 2)
        steps = made.decode.steps
        self.assertEqual(made(prompts, 10), expected)
        self.assertLess(made.decode.steps - steps, sum(map(len, expected)) / 2)

    def test_what_does_not_fit(self):
        model, params = load("gpt_oss", 4)
        with self.assertRaisesRegex(ValueError, "6 sequences on 4 devices"):
            generate.Generator(model, params, batch_size=6, length=8)
        made = generate.Generator(model, params, batch_size=4, length=8)
        with self.assertRaisesRegex(ValueError, "a prompt of 5 tokens, and 4 new ones"):
            made([[1] * 5], 4)


class SamplingTest(absltest.TestCase):
    def test_frequencies(self):
        """The tokens of the share, and no others, as often as their probabilities say."""
        shares = np.array([0.5, 0.05, 0.3, 0.15])
        count = 4000
        logits = np.broadcast_to(np.log(shares), (count, 4)).astype(np.float32)
        at = np.arange(count), np.zeros(count, int)
        for temperature, top_p, kept in (
            (1.0, 1.0, 4),
            (1.0, 0.79, 2),
            (0.5, 1.0, 4),
            (1.0, 0.1, 1),
        ):
            drawn = generate.Sampling(temperature, top_p)(logits, *at)
            expected = shares ** (1 / temperature)
            expected[np.argsort(-shares)[kept:]] = 0
            expected /= expected.sum()
            found = np.bincount(drawn, minlength=4) / count
            np.testing.assert_array_less(np.abs(found - expected), 0.03)
            self.assertEqual((found > 0).sum(), kept)

    def test_a_request_draws_the_same_in_any_slot(self):
        logits = np.zeros((3, 100), np.float32)
        draw = generate.Sampling(1.0)
        first = draw(logits, np.array([5, 6, 7]), np.array([1, 2, 3]))
        again = draw(logits, np.array([7, 5, 6]), np.array([3, 1, 9]))
        self.assertEqual((first[2], first[0]), (again[0], again[1]))
        self.assertNotEqual(first[1], again[2])


class TextTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def test_ids(self):
        made = text.Text(self.folder)
        self.assertEqual(made.encode(" 3 14"), [3, 14])
        self.assertEqual(made.decode([3, 14]), "3 14")
        with self.assertRaisesRegex(SystemExit, "'Once upon' is text; expected token ids"):
            made.encode("Once upon")

    def test_tokenizer(self):
        (self.folder / "tokenizer.json").touch()
        package = mock.MagicMock()
        tokenizer = package.Tokenizer.from_file.return_value
        tokenizer.encode.return_value.ids = [5, 6]
        tokenizer.decode.return_value = "upon"
        with mock.patch.dict(sys.modules, {"tokenizers": package}):
            made = text.Text(self.folder)
        self.assertEqual((made.encode("Once"), made.decode([7])), ([5, 6], "upon"))
        np.testing.assert_array_equal(made.corpus(b"Once"), [5, 6])

    def test_a_tokenizer_without_the_package(self):
        (self.folder / "tokenizer.json").touch()
        with (
            mock.patch.dict(sys.modules, {"tokenizers": None}),
            contextlib.redirect_stderr(io.StringIO()) as output,
        ):
            made = text.Text(self.folder)
        self.assertIn("pip install tokenizers", output.getvalue())
        self.assertEqual(made.encode("1"), [1])

    def test_stop_tokens(self):
        (self.folder / "config.json").write_text('{"eos_token_id": 7}')
        self.assertEqual(generate.stop_tokens(self.folder), [7])
        (self.folder / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
        self.assertEqual(generate.stop_tokens(self.folder), [8, 9])


class CommandTest(absltest.TestCase):
    def test_small_model(self):
        command = ["generate.py", "--max-new-tokens=3", "--prompt=1 2", "--prompt=7"]
        with (
            mock.patch.object(sys, "argv", command),
            mock.patch.object(generate, "make_mesh", lambda count: testing.expert_mesh(2)),
            contextlib.redirect_stdout(io.StringIO()) as output,
        ):
            generate.main()
        self.assertRegex(output.getvalue(), r"1 2 -> \d+ \d+ \d+\n7 -> \d+ \d+ \d+\n2 x cpu\n")
        self.assertIn("decode:  4 tokens in 2 steps", output.getvalue())


if __name__ == "__main__":
    absltest.main()
