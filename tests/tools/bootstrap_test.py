"""The first `make`: tools/find_python.sh and tools/environment.sh, with stand-in Pythons."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

from absl.testing import absltest, parameterized

TOOLS = pathlib.Path(__file__).parents[2] / "tools"
SCRIPT = TOOLS / "find_python.sh"

# A stand-in interpreter: runs the script's questions in this Python after changing the answers.
INTERPRETER = """#!/bin/sh
shift 2
exec {python} -I -c '
import importlib.util
import sys
import sysconfig
sys.version_info = {version}
sys.executable = "{path}"
sysconfig.get_config_var = dict({variables}).get
sysconfig.get_path = dict(include="{include}").get
importlib.util.find_spec = dict({modules}).get
exec(sys.stdin.read())
' "$@"
"""
BROKEN_SHIM = """#!/bin/sh
echo "pyenv: $(basename "$0"): command not found" >&2
exit 127
"""
# Python, pip and the interpreter of an environment in one: writes down each request.
RECORDER = """#!/bin/sh
case "$0 $*" in
  *" -I - "*) cat >/dev/null; echo "usable $0" ;;
  *" -m venv "*)
    mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; cp "$0" "$3/bin/pip"; echo "create $3" >>calls ;;
  *build_wheel.py)
    [ -n "${PYTHONDONTWRITEBYTECODE:-}" ] || mkdir -p build_tools/__pycache__
    mkdir -p dist; touch "dist/jax_ep-1$LOCAL-cp312-abi3-linux_x86_64.whl"; echo build >>calls ;;
  *"pip install "*)
    echo "install $3" >>calls; [ -z "${FAIL:-}" ] || { echo "no network"; exit 1; } ;;
esac
"""


class FindPythonTest(parameterized.TestCase):
    def setUp(self) -> None:
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name).resolve()
        self.path = [self.root / "first", self.root / "second"]
        self.headers = self.root / "include"
        self.headers.mkdir()
        (self.headers / "Python.h").touch()
        # The stand-ins call these commands, and must not find this machine's Pythons.
        commands = self.root / "commands"
        commands.mkdir()
        for name in ("basename", "touch"):
            (commands / name).symlink_to(shutil.which(name) or name)
        self.search_path = os.pathsep.join(map(str, [*self.path, commands]))

    def write(self, path: pathlib.Path, text: str) -> str:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return str(path)

    def interpreter(
        self,
        path: pathlib.Path,
        version: tuple[int, int],
        *,
        modules: str = "venv=1, ensurepip=1",
        variables: str = "",
        headers: bool = True,
    ) -> str:
        text = INTERPRETER.format(
            python=sys.executable,
            path=path,
            version=(*version, 0),
            modules=modules,
            variables=variables,
            include=self.headers if headers else self.root / "nowhere",
        )
        return self.write(path, text)

    def find(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(SCRIPT), *arguments],
            env={"PATH": self.search_path, "HOME": str(self.root / "home"), **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )

    def assert_found(self, expected: str, *arguments: str, **environment: str) -> None:
        result = self.find(*arguments, **environment)
        self.assertEqual(result.stdout, expected + "\n", result.stderr)
        self.assertEqual(result.returncode, 0)

    def assert_refused(self, reason: str, *arguments: str, **environment: str) -> None:
        result = self.find(*arguments, **environment)
        self.assertEqual(result.stdout, "")
        self.assertIn(reason, result.stderr)
        self.assertIn("Install one and run the command again", result.stderr)
        self.assertEqual(result.returncode, 1)

    def test_takes_a_versioned_name_before_python3(self) -> None:
        self.interpreter(self.path[0] / "python3", (3, 13))
        expected = self.interpreter(self.path[1] / "python3.12", (3, 12))
        self.assert_found(expected)

    def test_takes_python3_when_it_is_new_enough(self) -> None:
        self.assert_found(self.interpreter(self.path[0] / "python3", (3, 14)))

    def test_looks_past_an_old_python3_into_pyenv(self) -> None:
        self.interpreter(self.path[0] / "python3", (3, 11))
        versions = self.root / "pyenv" / "versions"
        self.interpreter(versions / "3.11.7" / "bin" / "python", (3, 11))
        expected = self.interpreter(versions / "3.12.1" / "bin" / "python", (3, 12))
        self.interpreter(versions / "3.13.0" / "bin" / "python", (3, 13))
        self.assert_found(expected, PYENV_ROOT=str(self.root / "pyenv"))

    def test_finds_pyenv_in_the_home_folder(self) -> None:
        path = self.root / "home" / ".pyenv" / "versions" / "3.13.0" / "bin" / "python"
        self.assert_found(self.interpreter(path, (3, 13)))

    def test_a_broken_shim_hides_nothing(self) -> None:
        self.write(self.path[0] / "python3.12", BROKEN_SHIM)
        self.assert_found(self.interpreter(self.path[1] / "python3.12", (3, 12)))

    def test_a_version_can_be_asked_for(self) -> None:
        self.interpreter(self.path[0] / "python3.12", (3, 12))
        expected = self.interpreter(self.path[1] / "python3.13", (3, 13))
        self.assert_found(expected, "3.13")
        self.assert_refused("python3.12 is Python 3.12, not 3.14", "3.14")

    def test_the_variable_is_the_only_candidate(self) -> None:
        self.interpreter(self.path[0] / "python3.12", (3, 12))
        old = self.interpreter(self.root / "old", (3, 11))
        new = self.interpreter(self.root / "new", (3, 13))
        self.assert_found(new, PYTHON=new)
        self.assert_refused("is Python 3.11, older than 3.12", PYTHON=old)
        self.assert_refused("/nowhere/python does not run", PYTHON="/nowhere/python")

    @parameterized.parameters(
        ({"modules": "venv=1"}, "has no venv module"),
        ({"headers": False}, "has no C headers"),
        ({"variables": "Py_GIL_DISABLED=1"}, "is a free-threaded build"),
    )
    def test_an_incomplete_python_is_passed_over(self, fault: dict[str, object], why: str) -> None:
        broken = self.interpreter(self.path[0] / "python3.12", (3, 12), **fault)  # type: ignore
        self.assert_refused(why, PYTHON=broken)
        self.assert_found(self.interpreter(self.path[1] / "python3.12", (3, 12)))

    def test_uv_is_asked_last(self) -> None:
        python = self.interpreter(self.root / "uv" / "python", (3, 12))
        # Has no Python until it is told to install one.
        self.write(
            self.path[0] / "uv",
            f"""#!/bin/sh
marker={self.root}/installed
case $2 in
  install) touch "$marker" ;;
  find) [ -e "$marker" ] && echo {python} ;;
esac
""",
        )
        self.assert_found(python)
        other = self.interpreter(self.path[1] / "python3.12", (3, 12))
        self.assert_found(other)


class EnvironmentTest(absltest.TestCase):
    """tools/environment.sh makes what is missing or out of date, and nothing else."""

    def setUp(self) -> None:
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name).resolve()
        for name in ("build_tools", "cmake", "jax_ep/_src/transfer", "ffi", "commands"):
            (self.root / name).mkdir(parents=True)
        for name in (
            "pyproject.toml",
            "CMakeLists.txt",
            "ffi/bindings.cc",
            "jax_ep/_src/transfer/plan.py",
        ):
            (self.root / name).touch()
        shutil.copytree(TOOLS, self.root / "tools")
        self.python = self.root / "python"
        self.write(self.python, RECORDER)

    def write(self, path: pathlib.Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def driver(self, version: str) -> None:
        self.write(self.root / "commands" / "nvidia-smi", f"#!/bin/sh\necho {version}\n")

    def make(self, *arguments: str, succeeds: bool = True, **environment: str) -> list[str]:
        """Runs the script; returns what it did."""
        result = subprocess.run(
            [self.root / "tools" / "environment.sh", *arguments],
            env={
                "PATH": f"{self.root / 'commands'}:/usr/bin:/bin",
                "PYTHON": str(self.python),
                "LOCAL": "+cu13",
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=60,
        )
        self.assertEqual(result.returncode == 0, succeeds, result.stdout + result.stderr)
        self.output = result.stdout + result.stderr
        calls = self.root / "calls"
        done = calls.read_text().splitlines() if calls.exists() else []
        calls.unlink(missing_ok=True)
        return done

    def edit(self, name: str) -> None:
        later = time.time() + 2
        os.utime(self.root / name, (later, later))

    def installs(self, extras: str = "flax,examples,docs,dev", local: str = "+cu13") -> str:
        return f"install dist/jax_ep-1{local}-cp312-abi3-linux_x86_64.whl[{extras}]"

    def no_driver(self) -> None:
        """Hides that of this machine."""
        self.write(self.root / "commands" / "nvidia-smi", "#!/bin/sh\nexit 9\n")

    def mode(self) -> str:
        return (self.root / "build" / "mode").read_text().strip()

    def test_kernels_are_compiled_for_a_gpu_or_on_request(self) -> None:
        self.no_driver()
        self.make()
        self.assertEqual(self.mode(), "OFF")
        self.assertIn("build", self.make("wheel"))
        self.assertEqual(self.mode(), "AUTO")
        self.assertNotIn("build", self.make())  # the wheel with kernels serves as well
        self.assertIn("build", self.make(JAX_EP_CUDA="ON"))
        self.assertEqual(self.mode(), "ON")
        self.assertNotIn("build", self.make())
        self.edit("ffi/bindings.cc")
        self.assertIn("build", self.make())
        self.assertEqual(self.mode(), "OFF")
        self.driver("580.82.07")
        self.assertIn("build", self.make())
        self.assertEqual(self.mode(), "ON")
        self.driver("550.54.15")
        self.assertIn("build", self.make())
        self.assertEqual(self.mode(), "AUTO")

    def test_makes_everything_once(self) -> None:
        self.no_driver()
        first = ["create build/environment", "build", "create .venv", self.installs()]
        self.assertEqual(self.make(), first)
        self.assertEqual(self.make(), [])
        shutil.rmtree(self.root / ".venv")
        self.assertEqual(self.make(), ["create .venv", self.installs()])

    def test_a_changed_source_makes_a_new_wheel(self) -> None:
        self.driver("580.82.07")
        self.make()
        for name in ("pyproject.toml", "ffi/bindings.cc", "jax_ep/_src/transfer/plan.py"):
            self.edit(name)
            self.assertEqual(self.make(), ["build", self.installs("flax,examples,docs,dev,cuda13")])
            os.utime(self.root / name, (1, 1))

    def test_an_interrupted_installation_is_made_again(self) -> None:
        self.driver("580.82.07")
        installs = self.installs("flax,examples,docs,dev,cuda13")
        self.assertEqual(self.make(succeeds=False, FAIL="1")[-1], installs)
        self.assertIn("no network", self.output)
        self.assertIn("build/install.log", self.output)
        self.assertEqual(self.make(), ["create .venv", installs])
        self.assertEqual(self.make(), [])

    def test_the_driver_chooses_the_extra(self) -> None:
        self.driver("580.82.07")
        self.assertEqual(self.make()[-1], self.installs("flax,examples,docs,dev,cuda13"))
        self.driver("550.54.15")
        self.edit("pyproject.toml")
        self.assertEqual(
            self.make(LOCAL="")[-1], self.installs("flax,examples,docs,dev,cuda12", "")
        )
        self.edit("pyproject.toml")
        self.assertEqual(
            self.make(LOCAL="+cu12")[-1], self.installs("flax,examples,docs,dev,cuda12", "+cu12")
        )
        self.assertEqual(self.make(LOCAL="+cu12", EXTRAS="dev")[-1], self.installs("dev", "+cu12"))

    def test_a_python_that_is_missing_ends_it(self) -> None:
        self.python.unlink()
        self.assertEqual(self.make(succeeds=False), [])
        self.assertIn("jax_ep needs Python 3.12 or newer, and none was found", self.output)


if __name__ == "__main__":
    absltest.main()
