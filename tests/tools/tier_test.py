"""The tiers: which tests belong to which."""

from __future__ import annotations

import fnmatch
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest.mock

import tier
from absl.testing import absltest, parameterized


class TierTest(parameterized.TestCase):
    def test_every_file_belongs_to_a_tier(self):
        of_cpu = {path.name for path in tier.suites()}
        with unittest.mock.patch.object(tier, "ON_GPU", True):
            of_gpu = {path.name for path in tier.suites()}
        every = {path.name for path in tier.FOLDER.glob("*/*_test.py")}
        self.assertEqual(of_cpu | of_gpu, every)
        on_gpu_only = {path.name for path in tier.FOLDER.glob("gpu_only/*_test.py")}
        self.assertEqual(of_gpu - of_cpu, on_gpu_only)
        self.assertContainsSubset({f"{name}_test.py" for name in tier.ON_BOTH}, of_cpu)

    def test_a_suite_of_no_tier_is_an_error(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "operations").mkdir()
            (root / "operations" / "forgotten_test.py").touch()
            with (
                unittest.mock.patch.object(tier, "FOLDER", root),
                self.assertRaisesRegex(
                    RuntimeError, r"operations/forgotten_test\.py belongs to no tier"
                ),
            ):
                tier.suites()

    def test_every_reason_is_one_of_suites(self):
        names = [path.relative_to(tier.FOLDER).as_posix() for path in tier.suites()]
        for pattern in tier.ON_CPU_ONLY:
            matching = fnmatch.filter(names, pattern)
            self.assertNotEmpty(matching, pattern)
            if "*" not in pattern:
                self.assertNotIn(matching[0].split("/")[1].removesuffix("_test.py"), tier.ON_BOTH)

    def test_every_slow_pattern_makes_a_test_slow(self):
        names = tier.all_tests
        if names is None:  # this run has chosen some
            collect = ["-m", "pytest", "--collect-only", "-q", "-m", "slow", tier.FOLDER]
            result = subprocess.run(
                [sys.executable, "-P", *collect],
                capture_output=True,
                text=True,  # -P: not the checkout
            )
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
            names = re.findall(r"^tests/(\S+::\S+)$", result.stdout, re.MULTILINE)
        self.assertEqual({*map(tier.slow_pattern, names)} - {None}, set(tier.SLOW))

    @parameterized.parameters(
        ("a/b_test.py::C::test_d", True),
        ("a/b_test.py::C::test_d0", True),
        ("a/b_test.py::C::test_e", False),
        ("a/b_test.py::C::test_e1", False),
        ("a/b_test.py::C::test_e2", True),
        ("a/b_test.py::C::test_e10", True),
        ("a/b_test.py::C::test_ef2", False),
    )
    def test_first_cases_are_not_slow(self, name, slow):
        patterns = {"a/*::test_d": 0, "a/*::test_e": 2}
        with unittest.mock.patch.object(tier, "SLOW", patterns):
            self.assertEqual(tier.slow_pattern(name) is not None, slow)

    @parameterized.parameters(1, 2, 4)
    def test_suites_of_gpus_can_be_imported_with_so_many_devices(self, gpus):
        """With CPU devices in their place: what a suite derives from the number of devices can be made."""
        code = (
            "import runpy, tier, testing\n"
            "for path in tier.suites(): runpy.run_path(str(path))\n"
            f"assert testing.NUM_DEVICES == {gpus} and len(tier.suites()) > 15"
        )
        rehearsal = {
            "JAX_EP_TEST_TIER": f"gpu{gpus}",
            "JAX_PLATFORMS": "cpu",
            "JAX_EP_IMPLEMENTATION": "xla",
        }
        subprocess.run([sys.executable, "-P", "-c", code], env=os.environ | rehearsal, check=True)

    def test_marks(self):
        @tier.only_on_cpu
        def small():
            pass

        @tier.needs_gpus(4)
        class Large:
            pass

        for gpus, expected in ((0, (True, True)), (2, (False, False)), (4, (False, True))):
            with unittest.mock.patch.multiple(tier, ON_GPU=gpus > 0, NUM_GPUS=gpus):
                found = tier.is_collected(small, None), tier.is_collected(None, Large)
                self.assertEqual(found, expected)

    def test_the_first_visible_gpus_are_used(self):
        for given, expected in ((None, "0,1"), ("3,1,2", "3,1"), ("5", None)):
            environment = {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
            with (
                unittest.mock.patch.multiple(tier, ON_GPU=True, NUM_GPUS=2),
                unittest.mock.patch.dict(tier.os.environ, environment, clear=True),
            ):
                if expected is None:
                    with self.assertRaisesRegex(RuntimeError, "too few devices"):
                        tier._prepare()
                else:
                    tier._prepare()
                    self.assertEqual(tier.os.environ["CUDA_VISIBLE_DEVICES"], expected)
                    self.assertEqual(tier.os.environ["JAX_EP_IMPLEMENTATION"], "cuda")


if __name__ == "__main__":
    absltest.main()
