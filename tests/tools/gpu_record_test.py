"""tools/gpu_record.py: what a run of the GPU tests leaves behind, and when the record is stale."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pathlib
import tempfile
import unittest.mock

import tool
from absl.testing import absltest, parameterized

REPORT = '<testsuites><testsuite tests="{}" failures="{}" errors="{}" skipped="{}" time="2.6"/></testsuites>'
CUBINS = {"digest": "0123456789abcdef", "compiler": "release 13.0, V13.0.88"}
SOURCES = {"host": "a" * 16, "python": "b" * 16}
HERE = {
    "machine_code": CUBINS,
    "device": "H200",
    "driver": "580",
    "versions": {"jax": "1"},
}
PASSED = {"passed": 5, "failed": 0, "date": "2026-01-01", "sources": SOURCES}


class RecordTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.tool = tool.load("gpu_record")
        self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        self.record = self.folder / "record.json"
        self.enter_context(
            unittest.mock.patch.multiple(
                self.tool, RECORD=self.record, machine=lambda: HERE, sources=lambda: SOURCES
            )
        )

    def report(self, *numbers: int) -> pathlib.Path:
        path = pathlib.Path(tempfile.mkstemp(".xml", dir=self.folder)[1])
        path.write_text(REPORT.format(*numbers))
        return path

    def test_counts(self):
        reports = [self.report(10, 1, 0, 0), self.report(5, 0, 1, 2), self.folder / "missing.xml"]
        found = self.tool.counts(reports)
        del found["date"]
        self.assertEqual(found, {"passed": 11, "failed": 3, "skipped": 2, "seconds": 5})

    def test_tiers_of_the_same_kernels_and_machine_are_kept(self):
        merged = self.tool.merged
        record = merged({}, HERE, "gpu4", {"passed": 7})
        record = merged(record, HERE, "gpu1", {"passed": 5})
        self.assertEqual(record, HERE | {"tiers": {"gpu1": {"passed": 5}, "gpu4": {"passed": 7}}})
        for changed in ({"machine_code": CUBINS | {"digest": "f" * 16}}, {"device": "B200"}):
            tiers = merged(record, HERE | changed, "gpu2", {"passed": 6})["tiers"]
            self.assertEqual(tiers, {"gpu2": {"passed": 6}})

    @parameterized.parameters((4, 0, 0, 0, 0), (4, 1, 0, 0, 1), (4, 0, 0, 1, 1), (0, 0, 0, 0, 1))
    def test_a_failure_or_a_skip_or_nothing_at_all_fails(self, *numbers_and_status):
        *numbers, status = numbers_and_status
        self.assertEqual(self.tool.main(["add", "gpu1", str(self.report(*numbers))]), status)
        record = json.loads(self.record.read_text())
        self.assertEqual(record["machine_code"], CUBINS)
        self.assertEqual(record["tiers"]["gpu1"]["sources"], SOURCES)

    @parameterized.parameters(
        ({}, 0, "passed with these kernels"),
        ({"digest": "f" * 16}, 1, "is stale"),
        ({"digest": "f" * 16, "compiler": "release 13.1"}, 2, "Cannot tell"),
        ({"compiler": "release 13.1"}, 0, "passed with these kernels"),
    )
    def test_check(self, changed, status, said):
        self.record.write_text(json.dumps(HERE | {"tiers": {"gpu1": PASSED}}))
        describe = unittest.mock.Mock(return_value=CUBINS | changed | {"library": ""})
        output = io.StringIO()
        with (
            unittest.mock.patch.object(self.tool.machine_code, "describe", describe),
            contextlib.redirect_stdout(output),
        ):
            self.assertEqual(self.tool.main(["check", "dist/x.whl"]), status)
        describe.assert_called_once_with(pathlib.Path("dist/x.whl"))
        self.assertIn(said, output.getvalue())

    def test_a_failure_on_record_is_no_pass(self):
        self.record.write_text(json.dumps(HERE | {"tiers": {"gpu1": PASSED | {"failed": 2}}}))
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            self.assertEqual(self.tool.check(CUBINS), 1)
        self.assertRegex(
            output.getvalue(), r"some failed, with .* gpu1 \(2026-01-01; 2 of \d+ failed\)"
        )

    @parameterized.parameters(
        (SOURCES, "gpu1 (2026-01-01)."),
        (SOURCES | {"python": "c" * 16}, "gpu1 (2026-01-01; python sources changed since)."),
    )
    def test_changed_sources_are_said_and_are_not_stale(self, recorded, said):
        self.record.write_text(
            json.dumps(HERE | {"tiers": {"gpu1": PASSED | {"sources": recorded}}})
        )
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            self.assertEqual(self.tool.check(CUBINS), 0)
        self.assertEndsWith(output.getvalue().strip(), said)

    def test_the_digest_of_another_machine_counts_for_its_library_only(self):
        library, carried = self.folder / "_ffi.so", self.folder / "machine_code.json"
        library.write_bytes(b"kernels")
        here = CUBINS | {"library": hashlib.sha256(b"kernels").hexdigest()}
        code = self.tool.machine_code
        describe = unittest.mock.Mock(side_effect=code.NoMachineCodeError("cuobjdump is missing"))
        module = unittest.mock.Mock(__file__=str(library))
        self.enter_context(unittest.mock.patch.object(code, "describe", describe))
        self.enter_context(unittest.mock.patch("jax_ep._ffi", module))
        self.enter_context(
            unittest.mock.patch.dict(os.environ, {"MACHINE_CODE": str(carried)}, clear=False)
        )
        with self.assertRaisesRegex(code.NoMachineCodeError, "does not exist; write it where"):
            self.tool.installed_machine_code()
        carried.write_text(json.dumps(here))
        self.assertEqual(self.tool.installed_machine_code(), CUBINS)
        library.write_bytes(b"other kernels")
        with self.assertRaisesRegex(code.NoMachineCodeError, "is not of .*_ffi.so"):
            self.tool.installed_machine_code()


class SourcesTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.tool = tool.load("gpu_record")
        self.root = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        self.enter_context(unittest.mock.patch.object(self.tool, "ROOT", self.root))
        for name in ("CMakeLists.txt", "ffi/runtime/a.cc", "ffi/device/b.cuh", "jax_ep/c.py"):
            self.write(name, name)

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def changed(self, name: str) -> list[str]:
        before = self.tool.sources()
        self.write(name, "changed")
        return [kind for kind, value in self.tool.sources().items() if value != before[kind]]

    def test_each_source_counts_for_its_kind(self):
        self.assertEqual(self.changed("ffi/runtime/a.cc"), ["host"])
        self.assertEqual(self.changed("jax_ep/c.py"), ["python"])
        self.assertEqual(self.changed("ffi/device/b.cuh"), [])
        self.assertEqual(self.changed("jax_ep/bench/d.py"), [])


class NvccTest(absltest.TestCase):
    def test_the_compiler_on_record(self):
        found = tool.load("gpu_record").nvcc_constraints()
        self.assertRegex(found, r"(?m)^nvidia-cuda-nvcc==\d+\.\d+\.\d+$")


if __name__ == "__main__":
    absltest.main()
