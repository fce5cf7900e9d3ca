"""Which compiled module `import jax_ep` takes: its own, or that of the plugin with CUDA kernels."""

from __future__ import annotations

import importlib
import pathlib
import shutil
import subprocess
import sys
import types
import unittest.mock

import testing  # isort: skip

from absl.testing import absltest, parameterized

import jax_ep
from jax_ep._src.core import extension

OF_PLUGIN = "def build_info(): return {'version': '0.1.0+cu13', 'cuda': True}"


def own_module(cuda: bool):
    """Lets the jax_ep of the test have a compiled module of this kind."""
    info = {"version": "0.1.0+cu12" if cuda else "0.1.0", "cuda": cuda}
    module = types.SimpleNamespace(build_info=lambda: info)
    return unittest.mock.patch.object(extension, "own_module", module)


class ChoiceTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.enterContext(unittest.mock.patch.object(jax_ep, "_ffi", jax_ep._ffi))
        self.enterContext(unittest.mock.patch.dict(sys.modules))

    @parameterized.parameters(*extension.PLUGINS)
    def test_the_plugin_of_the_same_version(self, name):
        with own_module(cuda=False), testing.plugin_package("0.1.0", OF_PLUGIN, name) as folder:
            module = extension.choose()
            self.assertEqual(pathlib.Path(module.__file__).parent, folder)
            self.assertIs(jax_ep._ffi, module)
            self.assertIs(importlib.import_module("jax_ep._ffi"), module)

    def test_the_first_of_two_plugins(self):
        with (
            own_module(cuda=False),
            testing.plugin_package("0.0.9", name="jax_ep_cuda12"),
            testing.plugin_package("0.1.0", OF_PLUGIN, "jax_ep_cuda13"),
        ):
            self.assertEqual(extension.choose().__name__, "jax_ep_cuda13._ffi")

    def test_own_module_without_a_plugin(self):
        with own_module(cuda=False):
            self.assertIs(extension.choose(), extension.own_module)

    def test_an_empty_folder_is_no_plugin(self):
        with own_module(cuda=False), testing.plugin_package("0.1.0") as folder:
            for file in folder.iterdir():
                file.unlink()
            self.assertIs(extension.choose(), extension.own_module)

    def test_a_build_with_kernels_looks_for_no_plugin(self):
        with own_module(cuda=True), testing.plugin_package("0.0.9"):
            self.assertIs(extension.choose(), extension.own_module)

    def test_another_version_is_an_error(self):
        with (
            own_module(cuda=False),
            testing.plugin_package("0.0.9"),
            self.assertRaisesRegex(
                jax_ep.MissingExtensionError,
                r"jax-ep-cuda13 0\.0\.9 .* beside jax-ep 0\.1\.0.*install jax-ep-cuda13==0\.1\.0`",
            ),
        ):
            extension.choose()

    def test_a_module_that_cannot_be_loaded_is_an_error(self):
        with (
            own_module(cuda=False),
            testing.plugin_package("0.1.0", "raise ImportError('GLIBC_2.99')"),
            self.assertRaisesRegex(jax_ep.MissingExtensionError, r"jax-ep-cuda13 .*GLIBC_2\.99"),
        ):
            extension.choose()


class ImportTest(absltest.TestCase):
    def test_all_of_jax_ep_uses_the_plugin(self):
        code = """
import sys, types
info = {"version": "0.1.0", "cuda": False}
sys.modules["jax_ep._ffi"] = types.SimpleNamespace(build_info=lambda: info)
import jax_ep, jax_ep.doctor.probes
from jax_ep import _ffi
for module in _ffi, jax_ep._ffi, jax_ep._src.core.runtime._ffi, jax_ep.doctor.probes._ffi:
    assert module.__name__ == "jax_ep_cuda13._ffi", module
assert jax_ep.build_info() == _ffi.build_info() != info
"""
        with testing.plugin_package("0.1.0") as folder:
            shutil.copy(extension.own_module.__file__, folder)
            folder.joinpath("_ffi.py").unlink()
            path = f"import sys; sys.path.insert(0, {str(folder.parent)!r})"
            subprocess.run([sys.executable, "-P", "-c", path + code], check=True, timeout=120)


if __name__ == "__main__":
    absltest.main()
