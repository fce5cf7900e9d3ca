"""Writes jax_ep/_ffi.pyi from the built module, or checks that it is up to date (--check)."""

import argparse
import pathlib
import subprocess
import sys
import tempfile

STUB = pathlib.Path(__file__).parent.parent / "jax_ep" / "_ffi.pyi"


def generate(module_folder: str) -> str:
    """Returns the stub of the _ffi module in `module_folder`."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "_ffi.pyi")
        stubgen = [sys.executable, "-m", "nanobind.stubgen", "-q", "-i", module_folder]
        subprocess.run([*stubgen, "-m", "_ffi", "-o", str(path)], check=True)
        ruff = [sys.executable, "-m", "ruff", "format", "--quiet", "--config"]
        subprocess.run([*ruff, str(STUB.parent.parent / "pyproject.toml"), str(path)], check=True)
        return path.read_text()


def main() -> int:
    """Returns 1 if --check finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--module-folder", required=True, help="folder of the built _ffi module")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    stub = generate(arguments.module_folder)
    if not arguments.check:
        STUB.write_text(stub)
        return 0
    if STUB.read_text() == stub:
        return 0
    sys.stderr.write(f"{STUB} is out of date; write it anew with build_tools/stub.py\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
