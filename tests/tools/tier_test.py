"""The tiers and the record of the GPU runs: what belongs to which, and what a run leaves behind."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest.mock

import tier
from absl.testing import absltest, parameterized

TOOL = tier.FOLDER.parent / "tools" / "gpu_record.py"
REPORT = '<testsuites><testsuite tests="{}" failures="{}" errors="{}" skipped="{}" time="2.6"/></testsuites>'
HERE = {"sources": "0123456789abcdef", "device": "H200", "driver": "580", "versions": {"jax": "1"}}


def load_tool():
    spec = importlib.util.spec_from_file_location("gpu_record", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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

        for gpus, expected in ((0, (True, False)), (2, (False, False)), (4, (False, True))):
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


class RecordTest(parameterized.TestCase):
    def test_counts(self):
        with tempfile.TemporaryDirectory() as folder:
            reports = [pathlib.Path(folder) / name for name in ("a.xml", "b.xml", "missing.xml")]
            reports[0].write_text(REPORT.format(10, 1, 0, 0))
            reports[1].write_text(REPORT.format(5, 0, 1, 2))
            found = load_tool().counts(reports)
        del found["date"]
        self.assertEqual(found, {"passed": 11, "failed": 3, "skipped": 2, "seconds": 5})

    def test_tiers_of_the_same_sources_and_machine_are_kept(self):
        merged = load_tool().merged
        record = merged({}, HERE, "gpu4", {"passed": 7})
        record = merged(record, HERE, "gpu1", {"passed": 5})
        self.assertEqual(record, HERE | {"tiers": {"gpu1": {"passed": 5}, "gpu4": {"passed": 7}}})
        record = merged(record, HERE | {"sources": "f" * 16}, "gpu2", {"passed": 6})
        self.assertEqual(record["tiers"], {"gpu2": {"passed": 6}})

    @parameterized.parameters((4, 0, 0, 0, 0), (4, 1, 0, 0, 1), (4, 0, 0, 1, 1), (0, 0, 0, 0, 1))
    def test_a_failure_or_a_skip_or_nothing_at_all_fails(self, *numbers_and_status):
        *numbers, status = numbers_and_status
        tool = load_tool()
        with tempfile.TemporaryDirectory() as folder:
            report = pathlib.Path(folder) / "report.xml"
            report.write_text(REPORT.format(*numbers))
            record = pathlib.Path(folder) / "record.json"
            with unittest.mock.patch.multiple(tool, RECORD=record, machine=lambda: HERE):
                self.assertEqual(tool.main("gpu1", str(report)), status)
            self.assertIn(HERE["sources"], record.read_text())


if __name__ == "__main__":
    absltest.main()
