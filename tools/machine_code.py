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
import dataclasses
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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elftools.elf.elffile import ELFFile

# Attributes of the sections .nv.info and .nv.info.KERNEL, as `cuobjdump -elf` names them.
EIATTR_PARAM_CBANK = 0x0A  # begins with the index of a symbol
EIATTR_EXTERNS = 0x0F  # consists of indices of symbols
# These are in .nv.info: the index of a function's symbol, then the value.
EIATTR_FRAME_SIZE = 0x11
EIATTR_MIN_STACK_SIZE = 0x12
EIATTR_REGCOUNT = 0x2F
RESOURCES = (EIATTR_FRAME_SIZE, EIATTR_MIN_STACK_SIZE, EIATTR_REGCOUNT)

SIZED_VALUE = 4  # the format of an attribute whose size and value follow it


class NoMachineCodeError(Exception):
    """A build whose kernels cannot be read: it has none, or a tool is missing."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One __global__ function for one architecture."""

    architecture: str
    name: str
    registers: int
    code_bytes: int
    shared_bytes: int
    fingerprint: str

    @property
    def content(self) -> tuple[str, str]:
        """The same for two kernels that do the same, whatever their names."""
        return self.architecture, self.fingerprint


@dataclasses.dataclass(frozen=True)
class Cubin:
    """The kernels of one source file for one architecture, and the data that they share."""

    kernels: tuple[Kernel, ...]
    shared_data: str  # a fingerprint; empty without such data
    compiler: str


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


# ---- reading a cubin


def read_cubin(path: pathlib.Path) -> Cubin:
    """Reads a cubin, whose name ends with ".ARCHITECTURE.cubin" as cuobjdump writes it."""
    try:
        from elftools.elf.elffile import ELFFile
    except ImportError as error:
        raise NoMachineCodeError("pyelftools is missing: pip install pyelftools") from error
    with path.open("rb") as file:
        return _Reader(ELFFile(file), path.suffixes[-2].removeprefix(".")).cubin()


class _Reader:
    """The sections and symbols of one cubin."""

    def __init__(self, elf: ELFFile, architecture: str):
        self._architecture = architecture
        self._sections: dict[str, Any] = {section.name: section for section in elf.iter_sections()}
        self._section_names = [section.name for section in elf.iter_sections()]
        self._symbols = list(self._sections[".symtab"].iter_symbols())
        self._resources: dict[str, dict[int, int]] = collections.defaultdict(dict)
        for attribute, value in _attributes(self._sections[".nv.info"].data()):
            if attribute in RESOURCES:
                name = self._symbols[int.from_bytes(value[:4], "little")].name
                self._resources[name][attribute] = int.from_bytes(value[4:], "little")

    def cubin(self) -> Cubin:
        names = [symbol.name for symbol in self._symbols if _is_kernel(symbol)]
        kernels = tuple(self._kernel(name) for name in names)
        note = self._sections.get(".note.nv.tkinfo")
        return Cubin(kernels, self._shared_data(names), _version(note.data() if note else b""))

    def _kernel(self, name: str) -> Kernel:
        content = hashlib.sha256()
        resources = self._resources[name]
        _add(content, sorted(resources.items()))
        shared = self._sections.get(f".nv.shared.{name}")
        shared_bytes = shared["sh_size"] if shared else 0
        _add(content, shared_bytes)
        for attribute, value in _attributes(self._sections[f".nv.info.{name}"].data()):
            _add(content, attribute, _without_symbols(attribute, value))
        code = self._sections[f".text.{name}"]
        for section in self._section_names:
            if section == code.name or _constants_of(section) == name:
                self._add_section(content, section, section.removesuffix(name))
        return Kernel(
            self._architecture,
            name,
            resources[EIATTR_REGCOUNT],
            code["sh_size"],
            shared_bytes,
            content.hexdigest()[:16],
        )

    def _shared_data(self, kernels: list[str]) -> str:
        """Returns the fingerprint of the data, and of the code if there is any, outside kernels."""
        prefixes = (".text", ".nv.constant", ".nv.global")
        names = [
            name
            for name in self._section_names
            if name.startswith(prefixes)
            and _constants_of(name) not in kernels
            and name.removeprefix(".text.") not in kernels
        ]
        if not names:
            return ""
        content = hashlib.sha256(self._architecture.encode())
        for name in names:
            self._add_section(content, name, name)
        return content.hexdigest()[:16]

    def _add_section(self, content: Any, name: str, neutral_name: str) -> None:
        """Adds a section's bytes, and what its relocations refer to."""
        section = self._sections[name]
        _add(content, neutral_name, section["sh_type"], section["sh_flags"], section["sh_size"])
        if section["sh_type"] != "SHT_NOBITS":
            content.update(section.data())
        for kind in (".rel", ".rela"):
            relocations = self._sections.get(f"{kind}{name}")
            entries = relocations.iter_relocations() if relocations else ()
            _add(content, sorted(self._neutral(entry) for entry in entries))

    def _neutral(self, relocation: Any) -> tuple[int, int, str, int]:
        """Returns a relocation with its symbol's kind, size and kind of section for its name."""
        symbol = self._symbols[relocation["r_info_sym"]]
        section = ""
        if isinstance(symbol["st_shndx"], int):
            section = ".".join(self._section_names[symbol["st_shndx"]].split(".")[:3])
        addend = relocation["r_addend"] if relocation.is_RELA() else 0
        target = f"{symbol['st_info']['type']} {symbol['st_size']} {section}"
        return relocation["r_offset"], relocation["r_info_type"], target, addend


def _is_kernel(symbol: Any) -> bool:
    info = symbol["st_info"]
    return bool(info["type"] == "STT_FUNC" and info["bind"] == "STB_GLOBAL")


def _constants_of(section: str) -> str | None:
    """Returns the kernel that a section of constants belongs to."""
    found = re.fullmatch(r"\.nv\.constant\d+\.(.+)", section)
    return found and found[1]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position < len(data):
        kind, attribute = data[position], data[position + 1]
        value = data[position + 2 : position + 4]
        position += 4
        if kind == SIZED_VALUE:
            size = int.from_bytes(value, "little")
            value = data[position : position + size]
            position += size
        yield attribute, value


def _without_symbols(attribute: int, value: bytes) -> bytes | int:
    """Returns an attribute's value without the indices of symbols in it."""
    if attribute == EIATTR_PARAM_CBANK:
        return value[4:]
    return len(value) if attribute == EIATTR_EXTERNS else value


def _add(content: Any, *values: object) -> None:
    content.update(repr(values).encode())


def _version(note: bytes) -> str:
    texts = [text.decode(errors="replace") for text in note.split(b"\0")]
    return next((text for text in texts if "release" in text), "unknown compiler")


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
