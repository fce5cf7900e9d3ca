"""Reads a cubin, the kernels of one source file for one architecture (an ELF file)."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import pathlib
import re
from collections.abc import Iterator
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
