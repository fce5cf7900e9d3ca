"""Compares the kernels of two builds by content: instructions, constants and resource usage.

  tools/machine_code.py digest BUILD [--write FILE]    one digest for all kernels of a build
  tools/machine_code.py list BUILD                     every kernel, with its registers and sizes
  tools/machine_code.py compare OLD NEW                the kernels that only one build has

A build is a wheel or a shared library. Kernels are paired by content, not by name, so a change that
only renames or moves code compares as equal. Where an instruction or a constant refers to a symbol,
the symbol's kind and size count instead of its name. PTX is not compared.

Needs pyelftools and cuobjdump (the extra "dev" has both). `digest --write` leaves a small JSON file
for a machine that has neither: tools/gpu_record.py reads it there.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable, Iterator

from cubin import Cubin, Kernel, NoMachineCodeError, read_cubin


def read_build(build: pathlib.Path) -> list[Cubin]:
    """Reads the kernels of a wheel or a shared library.

    Raises:
      NoMachineCodeError: the build has no kernels, or a tool is missing.
    """
    with tempfile.TemporaryDirectory() as folder:
        return [read_cubin(path) for path in extract_cubins(build, pathlib.Path(folder))]


def extract_cubins(build: pathlib.Path, folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes the cubins of a wheel or a shared library into `folder`."""
    library = folder / "library.so"
    library.write_bytes(library_bytes(build))
    result = subprocess.run(
        [_cuobjdump(), "-xelf", "all", library.name], cwd=folder, capture_output=True, text=True
    )
    cubins = sorted(folder.glob("*.cubin"))
    if result.returncode or not cubins:
        raise NoMachineCodeError(f"{build} has no kernels. {result.stdout}{result.stderr}".strip())
    return cubins


def library_bytes(build: pathlib.Path) -> bytes:
    """Returns the content of a shared library, or of the one in a wheel."""
    if build.suffix != ".whl":
        return build.read_bytes()
    with zipfile.ZipFile(build) as wheel:
        (name,) = (n for n in wheel.namelist() if re.fullmatch(r"jax_ep/_ffi\..*so", n))
        return wheel.read(name)


def digest(cubins: list[Cubin]) -> str:
    """Returns one digest for all kernels, whatever their names, their order and their files."""
    lines = [" ".join(kernel.content) for kernel in _kernels(cubins)]
    lines += [f"data {cubin.shared_data}" for cubin in cubins if cubin.shared_data]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]


def compiler(cubins: list[Cubin]) -> str:
    """Returns the compiler's version, e.g. "Cuda compilation tools, release 13.0, V13.0.88"."""
    return ", ".join(sorted({cubin.compiler for cubin in cubins}))


def describe(build: pathlib.Path) -> dict[str, str]:
    """Returns the digest of a build's kernels, their compiler, and the hash of the library file."""
    cubins = read_build(build)
    library = hashlib.sha256(library_bytes(build)).hexdigest()
    return {"digest": digest(cubins), "compiler": compiler(cubins), "library": library}


def compare(old: list[Cubin], new: list[Cubin]) -> list[str]:
    """Returns one line per difference: none if every kernel has its equal in the other build."""
    pairs = [(kernel, "-") for kernel in _only_in(old, new)]
    pairs += [(kernel, "+") for kernel in _only_in(new, old)]
    pairs.sort(key=lambda pair: pair[0].name)
    lines = [f"{sign} {_line(kernel)}" for kernel, sign in pairs]
    if _data(old) != _data(new):
        lines.append("constants or global variables that kernels share differ")
    if compiler(old) != compiler(new):
        lines.append(f"the compilers differ: {compiler(old)} and {compiler(new)}")
    return lines


def _only_in(side: list[Cubin], other: list[Cubin]) -> Iterator[Kernel]:
    """Yields the kernels that `other` lacks, or has fewer times."""
    others = collections.Counter(kernel.content for kernel in _kernels(other))
    for kernel in _kernels(side):
        if others[kernel.content]:
            others[kernel.content] -= 1
        else:
            yield kernel


def _data(cubins: list[Cubin]) -> collections.Counter[str]:
    return collections.Counter(cubin.shared_data for cubin in cubins if cubin.shared_data)


def _kernels(cubins: list[Cubin]) -> Iterator[Kernel]:
    for cubin in cubins:
        yield from cubin.kernels


# ---- tools and output


def _cuobjdump() -> str:
    """Returns the cuobjdump of the package nvidia-cuda-cuobjdump, or else of a CUDA toolkit."""
    packaged = pathlib.Path(sysconfig.get_path("purelib")) / "nvidia/cu13/bin/cuobjdump"
    if packaged.exists():
        if not os.access(packaged, os.X_OK):  # pip does not keep the permission
            packaged.chmod(0o755)
        return str(packaged)
    found = shutil.which("cuobjdump") or shutil.which("cuobjdump", path="/usr/local/cuda/bin")
    if found is None:
        raise NoMachineCodeError("cuobjdump is missing: pip install nvidia-cuda-cuobjdump")
    return found


def _line(kernel: Kernel) -> str:
    name = kernel.name
    if demangler := shutil.which("c++filt"):
        result = subprocess.run([demangler, name], capture_output=True, text=True, check=True)
        name = result.stdout.strip().replace("jax_ep::", "").replace("(anonymous namespace)::", "")
    return (
        f"{kernel.architecture:8} {kernel.fingerprint} {kernel.registers:4} registers "
        f"{kernel.code_bytes:7} bytes {kernel.shared_bytes:6} shared  {name}"
    )


def main(arguments: Iterable[str] | None = None) -> int:
    """Returns the exit status: 1 if `compare` found a difference, 2 if a build cannot be read."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("digest", "list"):
        subparser = commands.add_parser(command)
        subparser.add_argument("build", type=pathlib.Path)
    commands.choices["digest"].add_argument("--write", type=pathlib.Path, metavar="FILE")
    subparser = commands.add_parser("compare")
    subparser.add_argument("old", type=pathlib.Path)
    subparser.add_argument("new", type=pathlib.Path)
    options = parser.parse_args(None if arguments is None else list(arguments))
    try:
        if options.command == "digest":
            found = describe(options.build)
            print(found["digest"], found["compiler"])
            if options.write:
                options.write.write_text(json.dumps(found, indent=2) + "\n")
            return 0
        if options.command == "list":
            lines = sorted(_line(kernel) for kernel in _kernels(read_build(options.build)))
            print("\n".join(lines))
            return 0
        old, new = read_build(options.old), read_build(options.new)
    except NoMachineCodeError as error:
        print(error, file=sys.stderr)
        return 2
    lines = compare(old, new)
    print("\n".join(lines) or f"all {len(list(_kernels(new)))} kernels are equal")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
