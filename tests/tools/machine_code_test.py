"""tools/machine_code.py, on the kernels of this build and on changed copies of them."""

from __future__ import annotations

import contextlib
import io
import json
import pathlib
import tempfile
import unittest
import zipfile

import tool
from absl.testing import absltest

import jax_ep

machine_code = tool.load("machine_code")
LIBRARY = pathlib.Path(jax_ep._ffi.__file__)


def run(*arguments: object) -> tuple[int, str]:
    """Returns the tool's exit status, and what it printed."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = machine_code.main([str(argument) for argument in arguments])
    return status, output.getvalue()


class MachineCodeTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if not jax_ep.build_info()["cuda"]:
            raise unittest.SkipTest("this build has no CUDA kernels")
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        try:
            cls.cubins = machine_code.extract_cubins(LIBRARY, cls.folder)
            cls.build = [machine_code.read_cubin(path) for path in cls.cubins]
        except machine_code.NoMachineCodeError as error:
            raise unittest.SkipTest(str(error)) from error

    def changed(self, section: str) -> list[machine_code.Cubin]:
        """Returns the build with one section of the first cubin that has it changed."""
        from elftools.elf.elffile import ELFFile

        for index, path in enumerate(self.cubins):
            with path.open("rb") as file:
                elf = ELFFile(file)
                found = next((s for s in elf.iter_sections() if s.name.startswith(section)), None)
                if found is None:
                    continue
                start, old = found["sh_offset"], found.data()
            content = bytearray(path.read_bytes())
            content[start : start + len(old)] = bytes([old[0] ^ 1]) + old[1:]
            copy = self.folder / path.name.replace("library", "changed")
            copy.write_bytes(content)
            return [*self.build[:index], machine_code.read_cubin(copy), *self.build[index + 1 :]]
        raise ValueError(section)

    def test_a_build_equals_itself_in_any_order(self):
        self.assertEqual(machine_code.compare(self.build, self.build[::-1]), [])
        self.assertEqual(machine_code.digest(self.build), machine_code.digest(self.build[::-1]))
        self.assertGreater(sum(len(cubin.kernels) for cubin in self.build), 50)
        self.assertRegex(machine_code.compiler(self.build), r"release \d+\.\d+, V\d+\.\d+\.\d+$")

    def test_a_changed_instruction(self):
        changed = self.changed(".text.")
        lines = machine_code.compare(self.build, changed)
        self.assertLen(lines, 2)
        self.assertEqual([line[0] for line in lines], ["-", "+"])
        self.assertEqual(lines[0].split()[-1], lines[1].split()[-1])
        self.assertNotEqual(machine_code.digest(changed), machine_code.digest(self.build))

    def test_a_changed_constant(self):
        changed = self.changed(".nv.constant2.")
        self.assertLen(machine_code.compare(self.build, changed), 2)

    def test_another_compiler(self):
        old = machine_code.compiler(self.build).encode()
        path = self.folder / "other_compiler.1.sm_80.cubin"
        path.write_bytes(self.cubins[0].read_bytes().replace(old, old[:-2] + b"99"))
        changed = [machine_code.read_cubin(path), *self.build[1:]]
        (line,) = machine_code.compare(self.build, changed)
        self.assertIn("compilers differ", line)
        self.assertEqual(machine_code.digest(changed), machine_code.digest(self.build))

    def test_names_do_not_count(self):
        """A renamed kernel has the same digest: its name occurs in string tables only."""
        name = self.build[0].kernels[0].name
        renamed = "X" * len(name)
        path = self.folder / "renamed.1.sm_80.cubin"
        path.write_bytes(self.cubins[0].read_bytes().replace(name.encode(), renamed.encode()))
        changed = [machine_code.read_cubin(path), *self.build[1:]]
        self.assertEqual(changed[0].kernels[0].name, renamed)
        self.assertNotEqual(self.build[0].kernels[0].name, renamed)
        first = [cubin.kernels[0].fingerprint for cubin in (self.build[0], changed[0])]
        self.assertEqual(first[0], first[1])
        self.assertEqual(machine_code.compare(self.build, changed), [])

    def test_a_missing_kernel(self):
        lines = machine_code.compare(self.build, self.build[1:])
        self.assertLen(lines, len(self.build[0].kernels) + bool(self.build[0].shared_data))

    def test_commands(self):
        wheel = self.folder / "jax_ep-1-cp312-abi3-linux_x86_64.whl"
        with zipfile.ZipFile(wheel, "w") as file:
            file.write(LIBRARY, "jax_ep/_ffi.abi3.so")
        num_kernels = sum(len(cubin.kernels) for cubin in self.build)
        self.assertEqual(
            run("compare", LIBRARY, wheel), (0, f"all {num_kernels} kernels are equal\n")
        )
        written = self.folder / "machine_code.json"
        status, printed = run("digest", wheel, "--write", written)
        found = json.loads(written.read_text())
        self.assertEqual(status, 0)
        self.assertEqual(printed, f"{found['digest']} {found['compiler']}\n")
        self.assertEqual(found, machine_code.describe(LIBRARY))
        status, printed = run("list", LIBRARY)
        self.assertEqual((status, printed.count("\n")), (0, num_kernels))

    def test_a_library_without_kernels(self):
        library = self.folder / "library_of_text.so"
        library.write_text("no kernels")
        status, printed = run("digest", library)
        self.assertEqual(status, 2)
        self.assertIn("has no kernels", printed)


if __name__ == "__main__":
    absltest.main()
