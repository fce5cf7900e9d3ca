"""Compares the kernels of two builds by content: instructions, constants and resource usage.

  tools/machine_code.py digest BUILD        one number for all kernels of a build
  tools/machine_code.py list BUILD          every kernel, with its registers and sizes
  tools/machine_code.py compare OLD NEW     the kernels that only one of the builds has

A build is a wheel or a shared library. Kernels are paired by what they do, not by their names, so a
change that only renames or moves code compares as equal. Where an instruction or a constant refers
to a symbol, the symbol's kind and size count instead of its name. PTX is not compared.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import hashlib
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from typing import Any

from elftools.elf.elffile import ELFFile

# Attributes of .nv.info, as `cuobjdump -elf` names them. These hold the index of a symbol.
EIATTR_PARAM_CBANK = 0x0A
EIATTR_EXTERNS = 0x0F
EIATTR_REGCOUNT = 0x2F
SIZED_VALUE = 4  # format of an attribute whose value follows it


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One __global__ function for one architecture."""

    architecture: str
    name: str
    registers: int
    code_bytes: int
    shared_bytes: int
    fingerprint: str


@dataclasses.dataclass(frozen=True)
class Module:
    """One cubin: its kernels, and a fingerprint of the data that they share."""

    kernels: tuple[Kernel, ...]
    data: str
    compiler: str


def modules(build: pathlib.Path) -> list[Module]:
    """The cubins in a wheel or a shared library."""
    with tempfile.TemporaryDirectory() as folder:
        library = _library(build, pathlib.Path(folder))
        subprocess.run(
            [_cuobjdump(), "-xelf", "all", str(library.resolve())],
            cwd=folder,
            check=True,
            capture_output=True,
        )
        return [_module(path) for path in sorted(pathlib.Path(folder).glob("*.cubin"))]


def digest(found: list[Module]) -> str:
    """One number for the kernels of all cubins, whatever their names and their order."""
    lines = sorted(f"{kernel.architecture} {kernel.fingerprint}" for kernel in _kernels(found))
    lines += sorted(module.data for module in found)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def compiler(found: list[Module]) -> str:
    """The ptxas that made the cubins, e.g. "Cuda compilation tools, release 13.0, V13.0.88"."""
    return ", ".join(sorted({module.compiler for module in found}))


def compare(old: list[Module], new: list[Module]) -> list[str]:
    """What differs, a line each; empty if every kernel has its equal."""
    counts = [collections.Counter(_key(kernel) for kernel in _kernels(side)) for side in (old, new)]
    lines = []
    for sign, side, extra in (
        ("-", old, counts[0] - counts[1]),
        ("+", new, counts[1] - counts[0]),
    ):
        for kernel in _kernels(side):
            if extra[_key(kernel)] > 0:
                extra[_key(kernel)] -= 1
                lines.append(f"{sign} {_line(kernel)}")
    data = [collections.Counter(module.data for module in side) for side in (old, new)]
    if data[0] != data[1]:
        lines.append("the constants or global variables of a cubin differ")
    if compiler(old) != compiler(new):
        lines.append(f"compilers differ: {compiler(old)} and {compiler(new)}")
    return sorted(lines, key=lambda line: (line[1:], line[0]))


# ---- reading


def _cuobjdump() -> str:
    """Cuobjdump of the toolkit, or of the package nvidia-cuda-cuobjdump."""
    packaged = pathlib.Path(sysconfig.get_path("purelib")) / "nvidia/cu13/bin/cuobjdump"
    if packaged.exists():
        packaged.chmod(0o755)
        return str(packaged)
    found = shutil.which("cuobjdump") or shutil.which("cuobjdump", path="/usr/local/cuda/bin")
    if found is None:
        sys.exit("cuobjdump was not found: pip install nvidia-cuda-cuobjdump")
    return found


def _library(build: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    if build.suffix != ".whl":
        return build
    with zipfile.ZipFile(build) as wheel:
        (name,) = (n for n in wheel.namelist() if n.startswith("jax_ep/_ffi") and n.endswith(".so"))
        return pathlib.Path(wheel.extract(name, folder))


def _module(path: pathlib.Path) -> Module:
    architecture = path.name.split(".")[-2]
    with path.open("rb") as file:
        elf = ELFFile(file)
        symbols = list(elf.get_section_by_name(".symtab").iter_symbols())
        registers = {
            symbols[int.from_bytes(value[:4], "little")].name: int.from_bytes(value[4:], "little")
            for attribute, value in _attributes(elf.get_section_by_name(".nv.info").data())
            if attribute == EIATTR_REGCOUNT
        }
        names = [symbol.name for symbol in symbols if _is_kernel(symbol)]
        kernels = tuple(_kernel(elf, symbols, name, architecture, registers) for name in names)
        shared_data = hashlib.sha256(architecture.encode())
        for section in elf.iter_sections():
            if section.name.startswith((".nv.constant", ".nv.global")) and not any(
                section.name.endswith(f".{name}") for name in names
            ):
                _add_section(shared_data, elf, symbols, section, section.name)
        note = elf.get_section_by_name(".note.nv.tkinfo")
        return Module(kernels, shared_data.hexdigest()[:16], _tool(note.data() if note else b""))


def _is_kernel(symbol: Any) -> bool:
    return symbol["st_info"]["type"] == "STT_FUNC" and symbol["st_info"]["bind"] == "STB_GLOBAL"


def _kernel(
    elf: ELFFile,
    symbols: list[Any],
    name: str,
    architecture: str,
    registers: dict[str, int],
) -> Kernel:
    content = hashlib.sha256(str(registers[name]).encode())
    code = elf.get_section_by_name(f".text.{name}")
    shared = elf.get_section_by_name(f".nv.shared.{name}")
    shared_bytes = shared["sh_size"] if shared else 0
    content.update(f"shared {shared_bytes}".encode())
    for section in elf.iter_sections():
        if section.name == f".nv.info.{name}":
            for attribute, value in _attributes(section.data()):
                content.update(f"attribute {attribute}".encode() + _own_part(attribute, value))
        elif section.name == f".text.{name}" or (
            section.name.startswith(".nv.constant") and section.name.endswith(f".{name}")
        ):
            _add_section(content, elf, symbols, section, section.name.removesuffix(name))
    return Kernel(
        architecture,
        name,
        registers[name],
        code["sh_size"],
        shared_bytes,
        content.hexdigest()[:16],
    )


def _add_section(
    content: Any, elf: ELFFile, symbols: list[Any], section: Any, neutral_name: str
) -> None:
    """Adds a section's bytes, and what its relocations refer to."""
    content.update(f"{neutral_name} {section['sh_type']} {section['sh_size']}".encode())
    if section["sh_type"] != "SHT_NOBITS":
        content.update(section.data())
    relocations = elf.get_section_by_name(f".rela{section.name}")
    entries = sorted(
        (
            entry["r_offset"],
            entry["r_info_type"],
            _neutral(elf, symbols[entry["r_info_sym"]]),
            entry["r_addend"],
        )
        for entry in (relocations.iter_relocations() if relocations else ())
    )
    content.update(repr(entries).encode())


def _neutral(elf: ELFFile, symbol: Any) -> str:
    """A symbol by its kind, its size and the kind of its section."""
    index = symbol["st_shndx"]
    section = ""
    if isinstance(index, int):
        section = ".".join(elf.get_section(index).name.split(".")[:3])
    return f"{symbol['st_info']['type']} {symbol['st_size']} {section}"


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position < len(data):
        kind, attribute = data[position], data[position + 1]
        size = int.from_bytes(data[position + 2 : position + 4], "little")
        position += 4
        if kind == SIZED_VALUE:
            yield attribute, data[position : position + size]
            position += size
        else:
            yield attribute, data[position - 2 : position]


def _own_part(attribute: int, value: bytes) -> bytes:
    """An attribute's value without the symbol numbers in it."""
    if attribute == EIATTR_PARAM_CBANK:
        return value[4:]
    if attribute == EIATTR_EXTERNS:
        return str(len(value)).encode()
    return value


def _tool(note: bytes) -> str:
    texts = [text.decode(errors="replace") for text in note.split(b"\0") if len(text) > 8]
    return next((text for text in texts if "release" in text), "unknown compiler")


# ---- output


def _kernels(found: list[Module]) -> Iterator[Kernel]:
    for module in found:
        yield from module.kernels


def _key(kernel: Kernel) -> tuple[str, str]:
    return kernel.architecture, kernel.fingerprint


def _line(kernel: Kernel) -> str:
    name = kernel.name
    demangler = shutil.which("c++filt")
    if demangler:
        result = subprocess.run([demangler, name], capture_output=True, text=True, check=True)
        name = result.stdout.strip().replace("jax_ep::", "").replace("(anonymous namespace)::", "")
    return (
        f"{kernel.architecture:8} {kernel.fingerprint} {kernel.registers:4} registers "
        f"{kernel.code_bytes:7} bytes {kernel.shared_bytes:6} shared  {name}"
    )


def main() -> int:
    """The exit status: 1 if `compare` found a difference."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("digest", "list", "compare"))
    parser.add_argument("builds", nargs="+", type=pathlib.Path)
    arguments = parser.parse_args()
    found = [modules(build) for build in arguments.builds]
    if arguments.command == "compare":
        old, new = found
        lines = compare(old, new)
        print("\n".join(lines) or f"all {len(list(_kernels(new)))} kernels are equal")
        return int(bool(lines))
    for build in found:
        if arguments.command == "list":
            print("\n".join(sorted(_line(kernel) for kernel in _kernels(build))))
        print(digest(build), compiler(build))
    return 0


if __name__ == "__main__":
    sys.exit(main())
