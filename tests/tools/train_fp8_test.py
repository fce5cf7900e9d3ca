"""The FP8 training example: its verdict, and a small run on two CPU devices."""

from __future__ import annotations

import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
from absl.testing import absltest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import fp8_report  # noqa: E402


class ReportTest(absltest.TestCase):
    def test_differences_are_of_the_last_held_out_loss(self):
        runs = [
            fp8_report.Run("bfloat16", held_out=[{5: 8.0, 10: 2.0}, {5: 8.0, 10: 4.0}]),
            fp8_report.Run("block128", held_out=[{5: 8.0, 10: 2.01}, {5: 8.0, 10: 4.06}]),
            fp8_report.Run("row", held_out=[{5: 8.0, 10: math.nan}, {5: 8.0, 10: 4.0}]),
        ]
        differences = fp8_report.final_differences(runs)
        self.assertEqual(list(differences), ["block128", "row"])
        np.testing.assert_allclose(differences["block128"], (0.01, 0.005))
        self.assertTrue(math.isnan(differences["row"][0]))
        self.assertEqual(fp8_report.final_differences(runs[1:]), {})


class RunTest(absltest.TestCase):
    """A small run, in a process of its own."""

    def test_fp8_ends_beside_bfloat16(self):
        command = [
            *(sys.executable, str(EXAMPLES / "train_fp8.py"), "--small", "--expert-parallel", "2"),
            *("--recipes", "bfloat16", "block128", "--steps", "12", "--evaluate-every", "4"),
            *("--batch-size", "4", "--length", "32", "--held-out-batches", "2", "--seeds", "2"),
        ]
        environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        with tempfile.TemporaryDirectory() as folder:
            result = subprocess.run(
                [*command, "--output", folder],
                env=environment | {"JAX_PLATFORMS": "cpu"},
                capture_output=True,
                text=True,
                timeout=300,
            )
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
            self.assertRegex(result.stdout, r"block128: .*% from bfloat16's held-out loss")
            self.assertIn("block128 ends within 3% of bfloat16", result.stdout)
            read = {p.stem: json.loads(p.read_text()) for p in pathlib.Path(folder).glob("*.json")}
            picture = pathlib.Path(folder, "fp8_training.png").read_bytes()
        self.assertTrue(picture.startswith(b"\x89PNG"))
        table = read["fp8_training"]
        self.assertEqual(table["columns"], ["step", "bfloat16", "block128"])
        self.assertEqual([row[0] for row in table["rows"]], ["4", "8", "12"])
        held_out = np.array(table["rows"], float)[:, 1:]
        self.assertTrue((held_out[-1] < held_out[0]).all(), held_out)
        # Equal losses would mean that nothing is quantized.
        losses = np.array([read["losses"][name]["losses"] for name in ("bfloat16", "block128")])
        self.assertEqual(losses.shape, (2, 2, 12))
        self.assertGreater(np.abs(losses[0, 0] - losses[0, 1]).max(), 1e-2)
        self.assertGreater(np.abs(losses[0] - losses[1]).max(), 1e-5)
        np.testing.assert_allclose(losses[1], losses[0], rtol=5e-3)


if __name__ == "__main__":
    absltest.main()
