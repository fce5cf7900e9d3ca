"""The manners of `import jax_ep`: quick, silent, no backend; a clear error where the compiled module is missing."""

from __future__ import annotations

import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from unittest import mock

import jax
from absl.testing import absltest
from jax.extend import backend

import jax_ep
from jax_ep._src.core import runtime

FOLDER = pathlib.Path(jax_ep.__file__).parent


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh Python."""
    return subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )


class ImportTest(absltest.TestCase):
    def test_starts_no_backend(self):
        code = """
import jax_ep
from jax._src import xla_bridge
assert not xla_bridge._backends, xla_bridge._backends
import jax
jax.config.update("jax_num_cpu_devices", 3)  # raises once a backend is there
assert len(jax.devices("cpu")) == 3
"""
        run(code)

    def test_loads_no_cuda(self):
        code = """
import jax_ep
mapped = open("/proc/self/maps").read()
for library in "libcuda.so", "libcudart", "libnccl", "libnvshmem", "libucp", "xla_cuda":
    assert library not in mapped, library
"""
        run(code)

    def test_a_fork_does_not_shut_down(self):
        code = """
import atexit, os
from unittest import mock
with mock.patch.object(atexit, "unregister") as unregister:
    import jax_ep
if (child := os.fork()) == 0:
    os._exit(unregister.mock_calls != [mock.call(jax_ep._ffi.shutdown)])
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
        run(code)

    def test_prints_and_logs_nothing(self):
        result = run("import logging; logging.basicConfig(level=logging.DEBUG); import jax_ep")
        self.assertEqual(result.stdout, "")
        self.assertNotIn("jax_ep", result.stderr)

    def test_costs_little_beyond_jax(self):
        # Processor time, which other processes change little.
        code = """
import time, json, jax, jax.export, jax.numpy, jax.ad_checkpoint, jax.extend.core, jax.interpreters.mlir, jax.ffi
start = time.process_time()
import jax_ep
print(json.dumps(time.process_time() - start))
"""
        seconds = min(json.loads(run(code).stdout) for _ in range(3))
        self.assertLess(seconds, 0.3)

    def test_flax_is_not_imported(self):
        run("import jax_ep, sys; assert 'flax' not in sys.modules")

    def test_what_benchmarks_need_is_not_imported(self):
        run(
            "import jax_ep, sys\n"
            "for name in 'jax_ep.bench', 'rich', 'matplotlib', 'torch', 'tokamax':\n"
            "    assert name not in sys.modules, name"
        )

    def test_flax_is_imported_when_asked_for(self):
        run("import jax_ep; jax_ep.nnx.MoE; import sys; assert 'flax' in sys.modules")

    def test_unknown_names_are_attribute_errors(self):
        with self.assertRaisesRegex(AttributeError, "no attribute 'no_such_name'"):
            _ = jax_ep.no_such_name

    def test_version(self):
        self.assertEqual(jax_ep.__version__, jax_ep.build_info()["version"])
        self.assertRegex(jax_ep.__version__, r"^\d+\.\d+\.\d+(\.dev\d+)?(\+cu\d+)?$")


class BackendsTest(absltest.TestCase):
    def test_meshes_are_forgotten_when_backends_are_cleared_after_jax_distributed(self):
        for is_initialized in (True, False):
            with (
                mock.patch.object(jax.distributed, "is_initialized", return_value=is_initialized),
                mock.patch.object(runtime, "_ffi") as module,
            ):
                backend.clear_backends()
            self.assertEqual(module.forget_meshes.called, not is_initialized)


class LoggerTest(absltest.TestCase):
    def test_is_silent_by_default(self):
        """A warning on an unconfigured logger would reach stderr without the null handler."""
        handlers = logging.getLogger("jax_ep").handlers
        self.assertTrue(any(isinstance(handler, logging.NullHandler) for handler in handlers))
        result = run(
            "import jax_ep, logging; logging.getLogger('jax_ep').warning('not for stderr')"
        )
        self.assertEqual(result.stderr, "")
        self.assertEqual(result.stdout, "")

    def test_level_is_left_to_the_user(self):
        self.assertEqual(logging.getLogger("jax_ep").level, logging.NOTSET)


class MissingModuleTest(absltest.TestCase):
    def test_says_where_jax_ep_was_imported_from(self):
        """A source folder without the compiled module, found first on sys.path."""
        with tempfile.TemporaryDirectory() as folder:
            copy = pathlib.Path(folder) / "jax_ep"
            ignored = shutil.ignore_patterns("*.so", "*.pyd", "__pycache__")
            shutil.copytree(FOLDER, copy, ignore=ignored)
            # -S: without the site module no editable install can step in; other packages stay on the path.
            path = os.pathsep.join(
                [folder, *(entry for entry in sys.path if entry.endswith("-packages"))]
            )
            result = subprocess.run(
                [sys.executable, "-S", "-c", "import jax_ep"],
                capture_output=True,
                text=True,
                check=False,
                timeout=120,
                cwd=folder,
                env=os.environ | {"PYTHONPATH": path},
            )
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("MissingExtensionError", result.stderr)
        self.assertIn(str(copy), result.stderr)
        self.assertIn("_ffi", result.stderr)

    def test_is_an_import_error(self):
        code = """
import sys
sys.modules["jax_ep._ffi"] = None
try:
    import jax_ep
except ImportError as error:
    assert type(error).__mro__[1].__name__ == "Error", type(error).__mro__
    assert "imported from" in str(error)
else:
    raise AssertionError("imported without its compiled module")
"""
        run(code)


if __name__ == "__main__":
    absltest.main()
