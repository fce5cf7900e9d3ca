"""Finds the CUDA compiler of a build. CMakeLists.txt and version.py both ask here, so they agree.

The first nvcc that works is taken, in this order: the one named explicitly (--explicit or CUDACXX),
PATH, CUDA_PATH or CUDA_HOME, and the ones pip installs (nvidia/cu13, nvidia/cuda_nvcc) on sys.path.

JAX_EP_CUDA=AUTO (default) accepts that there is none; ON makes this an error; OFF does not look.
"""

import argparse
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

OLDEST = (12, 8)
MODES = ("AUTO", "ON", "OFF")
_PIP_LOCATIONS = ("nvidia/cu13/bin/nvcc", "nvidia/cuda_nvcc/bin/nvcc")


class NvccError(Exception):
    """The CUDA compiler that was asked for cannot be used."""


@dataclasses.dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler that was seen to work: its path, (major, minor), and where it was found."""

    path: str
    version: tuple[int, int]
    source: str


@dataclasses.dataclass(frozen=True)
class Search:
    """The outcome of a search: the compiler or None, and one line for people."""

    nvcc: Nvcc | None
    message: str


def read_mode(value: str | None = None) -> str:
    """Returns AUTO, ON or OFF from `value`, or else from the environment variable JAX_EP_CUDA."""
    given = value or os.environ.get("JAX_EP_CUDA") or "AUTO"
    mode = {"1": "ON", "TRUE": "ON", "0": "OFF", "FALSE": "OFF"}.get(given.upper(), given.upper())
    if mode not in MODES:
        raise NvccError(f"JAX_EP_CUDA is {given!r}; it must be one of {', '.join(MODES)}")
    return mode


def find_nvcc(mode: str | None = None, explicit: str | None = None) -> Search:
    """Looks for a CUDA compiler; see the module's text. Raises NvccError."""
    mode = read_mode(mode)
    if mode == "OFF":
        return Search(None, "CUDA off (JAX_EP_CUDA=OFF)")
    explicit = explicit or os.environ.get("CUDACXX")
    if explicit:  # no second choice: the user named this one
        nvcc = _try(explicit, "named explicitly")
        return Search(nvcc, f"CUDA {_dotted(nvcc.version)}: {nvcc.path} ({nvcc.source})")
    rejected: list[str] = []
    for path, source in _candidates():
        try:
            nvcc = _try(path, source)
        except NvccError as error:
            rejected.append(str(error))
            continue
        return Search(nvcc, f"CUDA {_dotted(nvcc.version)}: {nvcc.path} ({nvcc.source})")
    reason = "; ".join(rejected) or "no nvcc on PATH, in CUDA_PATH or CUDA_HOME, or from pip"
    if mode == "ON":
        raise NvccError(f"JAX_EP_CUDA=ON, but {reason}")
    return Search(None, f"no CUDA: {reason}")


def _candidates() -> Iterator[tuple[str, str]]:
    on_path = shutil.which("nvcc")
    if on_path:
        yield on_path, "on PATH"
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        root = os.environ.get(variable)
        if root:
            yield os.path.join(root, "bin", "nvcc"), variable
    for location in _PIP_LOCATIONS:
        for folder in sys.path:
            path = pathlib.Path(folder, location)
            if path.is_file():
                yield str(path), "installed by pip"


def _try(path: str, source: str) -> Nvcc:
    """Checks that an nvcc is recent enough and finds its own headers and a host compiler."""
    resolved = shutil.which(path)
    if resolved is None:
        raise NvccError(f"{path} ({source}) is not an executable file")
    told = re.search(r"release (\d+)\.(\d+)", _output([resolved, "--version"]))
    if told is None:
        raise NvccError(f"{resolved} ({source}) does not tell its version")
    version = int(told[1]), int(told[2])
    if version < OLDEST:
        needed = f"{_dotted(OLDEST)} or newer is needed"
        raise NvccError(f"{resolved} ({source}) is CUDA {_dotted(version)}; {needed}")
    with tempfile.TemporaryDirectory() as folder:
        empty = pathlib.Path(folder, "empty.cu")
        empty.touch()
        _output([resolved, "-E", str(empty), "-o", os.devnull])
    return Nvcc(resolved, version, source)


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NvccError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise NvccError(f"{command[0]} does not work: {lines[0]}")
    return done.stdout


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def main() -> int:
    """Prints three lines for CMake: path and version, empty if there is none, and the message."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", help="AUTO, ON or OFF; default: the environment's JAX_EP_CUDA")
    parser.add_argument("--explicit", help="path of the nvcc to use")
    arguments = parser.parse_args()
    try:
        search = find_nvcc(arguments.mode, arguments.explicit)
    except NvccError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    nvcc = search.nvcc
    lines = (nvcc.path if nvcc else "", _dotted(nvcc.version) if nvcc else "", search.message)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
