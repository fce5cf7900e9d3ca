"""tools/release.py and tools/release_files.py: what the wheels of a release have, and which files are refused."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile

import tool
from absl.testing import absltest, parameterized

files = tool.load("release_files")
release = tool.load("release")

METADATA = """Metadata-Version: 2.4
Name: jax_ep
Version: 0.1.0
Requires-Dist: jax>=0.11.2
Provides-Extra: cuda13
Requires-Dist: jax[cuda13]>=0.11.2; extra == "cuda13"
Provides-Extra: cuda12
Requires-Dist: jax[cuda12]>=0.11.2; extra == "cuda12"
"""
WITH_CUDA = {
    "jax_ep/__init__.py": b"",
    "jax_ep/_ffi.abi3.so": b"kernels",
    "jax_ep-0.1.0+cu13.dist-info/METADATA": METADATA.encode(),
    "jax_ep-0.1.0+cu13.dist-info/WHEEL": b"Tag: cp312-abi3-linux_x86_64\n",
    "jax_ep-0.1.0+cu13.dist-info/licenses/LICENSE": b"a license",
}


class WheelsTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def test_extras_pin_the_packages_of_kernels(self):
        content = {"jax_ep-0.1.0.dist-info/METADATA": METADATA.encode(), "jax_ep/a.py": b"a"}
        changed = files.host_files(content, "0.1.0")
        lines = changed.pop("jax_ep-0.1.0.dist-info/METADATA").decode().splitlines()
        self.assertEqual(changed, {"jax_ep/a.py": b"a"})
        self.assertSameElements(
            set(lines) - set(METADATA.splitlines()),
            {
                'Requires-Dist: jax-ep-cuda13==0.1.0; extra == "cuda13"',
                'Requires-Dist: jax-ep-cuda12==0.1.0; extra == "cuda12"',
            },
        )

    def test_metadata_without_an_extra_is_refused(self):
        with self.assertRaisesRegex(files.ReleaseError, "Provides-Extra: cuda12"):
            files.pin_plugins(METADATA.replace("cuda12", "cuda11"), "0.1.0")

    def test_a_package_of_kernels_has_the_module_and_what_it_needs(self):
        plugin = files.plugin_files(WITH_CUDA, "0.1.0", 13)
        info = "jax_ep_cuda13-0.1.0.dist-info"
        self.assertEqual(
            set(plugin),
            {
                *("jax_ep_cuda13/__init__.py", "jax_ep_cuda13/_ffi.abi3.so"),
                *(f"{info}/METADATA", f"{info}/WHEEL", f"{info}/licenses/LICENSE"),
            },
        )
        self.assertEqual(plugin["jax_ep_cuda13/_ffi.abi3.so"], b"kernels")
        self.assertIn("Requires-Dist: jax-ep==0.1.0\n", plugin[f"{info}/METADATA"].decode())
        for major, version in (13, "0.2.0"), (12, "0.1.0"):
            with self.assertRaisesRegex(files.ReleaseError, rf"jax_ep {version}\+cu{major}"):
                files.plugin_files(WITH_CUDA, version, major)

    def test_pip_installs_a_written_wheel(self):
        path = self.folder / "jax_ep_cuda13-0.1.0-py3-none-any.whl"
        plugin = files.plugin_files(WITH_CUDA, "0.1.0", 13)
        plugin["jax_ep_cuda13-0.1.0.dist-info/WHEEL"] = (
            b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        files.write_wheel(path, plugin)
        self.assertEqual(files.read_wheel(path), plugin)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
        subprocess.run([*pip, "--target", self.folder / "site", path], check=True)
        code = "import jax_ep_cuda13; print(jax_ep_cuda13.__version__)"
        printed = subprocess.run(
            [sys.executable, "-c", code], cwd=self.folder / "site", capture_output=True, check=True
        )
        self.assertEqual(printed.stdout, b"0.1.0\n")

    def test_the_same_files_make_the_same_bytes(self):
        paths = [self.folder / name for name in ("a.whl", "b.whl")]
        for path in paths:
            files.write_wheel(path, WITH_CUDA)
        self.assertEqual(*(path.read_bytes() for path in paths))
        with zipfile.ZipFile(paths[0]) as wheel:
            mode = wheel.getinfo("jax_ep/_ffi.abi3.so").external_attr >> 16
        self.assertEqual(mode, 0o755)


class ChecksTest(parameterized.TestCase):
    @parameterized.parameters(
        ("jax_ep-0.1.0-cp312-abi3-manylinux_2_27_x86_64.whl", None),
        ("jax_ep-0.1.0-cp312-abi3-manylinux_2_26_x86_64.manylinux_2_35_x86_64.whl", None),
        ("jax_ep-0.1.0-cp312-abi3-manylinux_2_35_x86_64.whl", "manylinux_2_28 or older"),
        ("jax_ep-0.1.0-cp312-abi3-linux_x86_64.whl", "manylinux_2_28 or older"),
        ("jax_ep-0.1.0-cp312-cp312-manylinux_2_27_x86_64.whl", "stable ABI"),
    )
    def test_tags(self, name, problem):
        if problem is None:
            files.check_tag(name)
        else:
            with self.assertRaisesRegex(files.ReleaseError, problem):
                files.check_tag(name)

    def test_contents(self):
        expected = files.expected_files("0.1.0", ["jax_ep/a.py", "jax_ep/py.typed", "ffi/a.cc"])
        files.check_contents(expected, expected)
        self.assertIn("jax_ep/py.typed", expected)
        self.assertNotIn("ffi/a.cc", expected)
        with self.assertRaisesRegex(files.ReleaseError, r"missing files: \['jax_ep/py.typed'\]"):
            files.check_contents(expected - {"jax_ep/py.typed"}, expected)
        with self.assertRaisesRegex(files.ReleaseError, r"not belong there: \['jax_ep/b.py'\]"):
            files.check_contents(expected | {"jax_ep/b.py"}, expected)

    def test_sdist_and_size(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "jax_ep-0.1.0.tar.gz")
            source = pathlib.Path(folder, "a.py")
            source.write_bytes(b"a")
            with tarfile.open(path, "w:gz") as archive:
                for name in "a.py", "PKG-INFO":
                    archive.add(source, f"jax_ep-0.1.0/{name}")
            files.check_sdist(path, ["a.py", ".ci/run"])
            with self.assertRaisesRegex(files.ReleaseError, r"missing files: \['b.py'\]"):
                files.check_sdist(path, ["a.py", "b.py"])
            files.check_size(path, "sdist")
            with path.open("ab") as file:
                file.truncate(11 * 2**20)
            with self.assertRaisesRegex(files.ReleaseError, r"has 11\.0 MiB; at most 10"):
                files.check_size(path, "sdist")


class SourcesTest(absltest.TestCase):
    """The tool reads the version, the oldest JAX and a layer in the repository."""

    def test_version_and_oldest_jax(self):
        self.assertRegex(release.version(), r"^\d+\.\d+\.\d+")
        self.assertRegex(release.oldest_jax(), r"^jax==\d+\.\d+\.\d+$")

    def test_the_citation_has_the_version(self):
        citation = (release.ROOT / "CITATION.cff").read_text()
        self.assertIn(f"\nversion: {release.version()}\n", citation)

    def test_the_layer_is_readmes(self):
        self.assertIn("jax_ep.moe_mlp(", release.smoke_test())
        compile(release.smoke_test(), "layer", "exec")

    def test_a_compiler_is_found_by_its_version(self):
        with tempfile.TemporaryDirectory() as folder:
            nvcc = pathlib.Path(folder, "nvcc")
            nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 99.8, V99.8.93\n")
            nvcc.chmod(0o755)
            self.assertEqual(release.find_nvcc(99, {"NVCC99": str(nvcc)}), str(nvcc))
            self.assertIsNone(release.find_nvcc(98, {"NVCC98": str(nvcc)}))

    def test_pyproject_has_an_extra_for_each_package_of_kernels(self):
        project = (release.ROOT / "pyproject.toml").read_text()
        for major in files.MAJORS:
            self.assertTrue(re.search(rf"^cuda{major} = ", project, re.MULTILINE))


if __name__ == "__main__":
    absltest.main()
