"""The training example: its claims, and that a killed run goes on as if nothing had happened."""

from __future__ import annotations

import csv
import math
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

import numpy as np
from absl.testing import absltest, parameterized

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import text_data  # noqa: E402
import train_moe_lm  # noqa: E402
from run_checkpoints import Checkpoints  # noqa: E402
from training_report import History  # noqa: E402

TINY = [
    *("--steps=60", "--checkpoint-every=20", "--batch-size=8", "--length=32"),
    *("--width=16", "--num-layers=1", "--num-heads=2", "--intermediate-size=8"),
]
WITHOUT_EXTRAS = ["--check-dense-steps=0", "--sample-bytes=0"]
TIMEOUT_SECONDS = 300


class RunTest(absltest.TestCase):
    """Real runs of a tiny model, in processes of their own."""

    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)

    def start(self, name: str, *arguments: str) -> subprocess.Popen[str]:
        environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        command = [
            *(sys.executable, str(EXAMPLES / "train_moe_lm.py"), *TINY),
            *(f"--output={self.folder / name}", f"--checkpoint={self.checkpoints(name)}"),
            *arguments,
        ]
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run_to_end(self, name: str, *arguments: str) -> tuple[int, str]:
        process = self.start(name, *arguments)
        self.addCleanup(process.kill)
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
        return process.returncode, output

    def test_two_processes_have_the_losses_of_one(self):
        options = ["--steps=20", "--check-dense-steps=0", "--sample-bytes=4"]
        _, output = self.run_to_end("one", *options, "--cpu-devices=2")
        one = self.losses("one")
        self.assertLen(one, 20, output)
        command = [
            *(sys.executable, str(EXAMPLES / "launch.py"), "2", str(EXAMPLES / "train_moe_lm.py")),
            *(*TINY, *options, "--cpu-devices=1", f"--output={self.folder / 'two'}"),
        ]
        environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        run = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
        )
        self.assertIn("{'data': 1, 'expert': 2}", run.stdout, run.stderr)
        self.assertEqual(self.losses("two"), one, run.stdout + run.stderr)

    def checkpoints(self, name: str) -> pathlib.Path:
        return self.folder / name / "checkpoints"

    def losses(self, name: str) -> list[float]:
        path = self.folder / name / "losses.csv"
        if not path.exists():
            return []
        # The run may be writing still, or have been killed while it did: only whole lines count.
        whole_lines, _, _ = path.read_text().rpartition("\n")
        rows = list(csv.DictReader(whole_lines.splitlines()))
        self.assertEqual([int(row["step"]) for row in rows], list(range(len(rows))))
        return [float(row["loss"]) for row in rows]

    def test_killed_and_resumed(self):
        status, output = self.run_to_end("whole", "--check-dense-steps=5", "--sample-bytes=8")
        whole = self.losses("whole")
        self.assertLen(whole, 60, output)
        for name in ("loss.png", "expert_load.png"):
            self.assertGreater((self.folder / "whole" / name).stat().st_size, 10_000)
        self.assertIn("a sample:\ndef ", output)
        # So short a run does not beat the bigram model, and does not claim it.
        self.assertEqual(status, 0, output)
        self.assertIn("takes all 450 steps: not claimed after 60", output)
        self.assertIn("the first 5 losses are those of dense", output)

        process = self.start("killed", *WITHOUT_EXTRAS)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while len(self.losses("killed")) < 25:
            self.assertLess(time.monotonic(), deadline)
            self.assertIsNone(process.poll(), "ended by itself")
            time.sleep(0.01)
        process.kill()
        process.wait()
        self.assertLess(len(self.losses("killed")), 60)
        shutil.copytree(self.checkpoints("killed"), self.checkpoints("on_4"))

        _, output = self.run_to_end("killed", *WITHOUT_EXTRAS)
        self.assertRegex(output, r"resumed after step (20|40)")
        self.assertEqual(self.losses("killed"), whole)

        _, output = self.run_to_end("on_4", *WITHOUT_EXTRAS, "--cpu-devices=4")
        self.assertRegex(output, r"resumed after step (20|40)")
        self.assertIn("4 cpu devices", output)
        np.testing.assert_allclose(self.losses("on_4"), whole, rtol=1e-4)


class ClaimsTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("all_hold", 2.0, 0.4, 0.0, "", False, []),
        ("held_out", 2.6, 0.4, 0.0, "", False, ["held-out"]),
        ("nan", math.nan, 0.4, 0.0, "", False, ["held-out"]),
        ("share", 2.0, 0.2, 0.0, "", False, ["every expert"]),
        ("dense", 2.0, 0.4, 2e-4, "", False, ["dense"]),
        ("dense_is_nan", 2.0, 0.4, math.nan, "", False, ["dense"]),
        ("gpu", 1.7, 0.4, 0.0, 'custom_call_target="jax_ep.dispatch.v1"', True, []),
        (
            "gpu_trigram",
            2.0,
            0.4,
            0.0,
            'custom_call_target="jax_ep.dispatch.v1"',
            True,
            ["trigram"],
        ),
        ("gpu_fallback", 1.7, 0.4, 0.0, 'op_name="jax_ep.dispatch"', True, ["kernels"]),
    )
    def test_failing(
        self,
        held_out: float,
        share: float,
        difference: float,
        hlo: str,
        on_gpu: bool,
        expected: list[str],
    ):
        load = np.full((2, 16), 1000)
        load[1, 3] = 1000 * share
        load[1, 4] += 1000 - load[1, 3]
        history = History([3.0, 2.5], [load, load], {1: 5.0, 2: held_out})
        claims = train_moe_lm.check_claims(
            history,
            {"bigram": 2.4, "trigram": 1.8},
            [3.0, 2.5 + difference],
            [3.0, 2.5],
            hlo,
            on_gpu,
            full_steps=2,
        )
        failed = [claim.text for claim in claims if not claim.holds]
        self.assertLen(failed, len(expected))
        for text, word in zip(failed, expected, strict=True):
            self.assertIn(word, text)

    def test_a_short_run_claims_nothing_of_the_trained_model(self):
        history = History([3.0], [np.array([[0, 20]])], {1: 5.0})
        claims = train_moe_lm.check_claims(
            history, {"bigram": 2.4}, [3.0], [3.0], "", False, full_steps=2
        )
        self.assertEqual([claim.holds for claim in claims], [True])
        self.assertIn("dense", claims[0].text)

    def test_early_steps_do_not_count_for_shares(self):
        bad, good = np.array([[0, 20]]), np.array([[10, 10]])
        history = History([0.0] * 200, [bad] * 100 + [good] * 100)
        self.assertEqual(history.smallest_share(100), 1.0)
        self.assertEqual(history.smallest_share(200), 0.5)


class CheckpointsTest(absltest.TestCase):
    def test_other_settings_are_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder)
            Checkpoints(path, 10, {"steps": 100}).close()
            Checkpoints(path, 10, {"steps": 100}).close()
            with self.assertRaisesRegex(SystemExit, "another run"):
                Checkpoints(path, 10, {"steps": 200})

    def test_history_survives(self):
        history = History(
            [1.0, 0.1 + 0.2], [np.arange(6, dtype=np.int32).reshape(2, 3)] * 2, {2: 3.0}
        )
        again = History.from_json(history.to_json())
        self.assertEqual(again.losses, history.losses)
        self.assertEqual(again.held_out, history.held_out)
        np.testing.assert_array_equal(again.expert_loads, history.expert_loads)


class TextTest(absltest.TestCase):
    def test_split(self):
        corpus = text_data.standard_library()
        total = len(corpus.training) + len(corpus.held_out)
        self.assertGreater(total, 2_000_000)
        self.assertBetween(len(corpus.held_out) / total, 0.03, 0.3)

    def test_batches_follow_from_seed_and_step(self):
        text = np.arange(1000, dtype=np.uint32).astype(np.uint8)

        def batch(seed: int, step: int) -> np.ndarray:
            return text_data.batch(text, step, seed=seed, batch_size=4, length=10)

        self.assertEqual(batch(0, 5).shape, (4, 11))
        np.testing.assert_array_equal(batch(0, 5), batch(0, 5))
        self.assertTrue((batch(0, 5) != batch(0, 6)).any())
        self.assertTrue((batch(0, 5) != batch(1, 5)).any())

    def test_ngram_losses(self):
        rng = np.random.default_rng(0)
        text = rng.integers(97, 101, 400).astype(np.uint8)
        windows = rng.integers(97, 102, (3, 12)).astype(np.int32)

        def probability(context: list[int], byte: int) -> float:
            if not context:
                return ((text == byte).sum() + 1) / (len(text) + 256)
            width = len(context)
            places = range(width, len(text))
            after = [text[i] for i in places if list(text[i - width : i]) == context]
            return (after.count(byte) + 5 * probability(context[1:], byte)) / (len(after) + 5)

        losses = text_data.ngram_losses(text, windows)
        for name, width in (("bigram", 1), ("trigram", 2)):
            expected = np.mean(
                [
                    -math.log(probability(list(row[max(0, i - width) : i]), row[i]))
                    for row in windows
                    for i in range(1, len(row))
                ]
            )
            self.assertAlmostEqual(losses[name], expected, places=9)


if __name__ == "__main__":
    absltest.main()
