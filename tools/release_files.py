"""The files of a release: wheels read and written, and what is checked of each.

tools/release.py builds them.
"""

from __future__ import annotations

import base64
import hashlib
import pathlib
import re
import tarfile
import zipfile
from collections.abc import Iterable

MAJORS = (13, 12)
NEWEST_GLIBC = (2, 28)  # RHEL 8 has it; jaxlib's wheels ask for 2.27
MAX_MIB = {"sdist": 10, "host": 5, "plugin": 60}  # PyPI takes 100

Files = dict[str, bytes]


class ReleaseError(Exception):
    """A file of the release is not as it should be."""


# ---- wheels as files


def read_wheel(path: pathlib.Path) -> Files:
    """Returns the files of a wheel by name, without its RECORD."""
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if not name.endswith(("/", "/RECORD"))]
        return {name: wheel.read(name) for name in names}


def write_wheel(path: pathlib.Path, files: Files) -> None:
    """Writes a wheel with its RECORD; the same files make the same bytes."""
    metadata = next(name for name in files if name.endswith(".dist-info/METADATA"))
    record = metadata.replace("METADATA", "RECORD")
    lines = []
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(content)}\n")
    lines.append(f"{record},,\n")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in (*files.items(), (record, "".join(lines).encode())):
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = (0o755 if name.endswith(".so") else 0o644) << 16
            wheel.writestr(info, content)


def pin_plugins(metadata: str, release: str) -> str:
    """Lets the extras cuda13 and cuda12 require the packages with the kernels, of this version."""
    for major in MAJORS:
        extra = f"cuda{major}"
        line = f"Provides-Extra: {extra}\n"
        if metadata.count(line) != 1:
            raise ReleaseError(f"jax_ep's metadata should have one line {line!r}")
        pin = f'Requires-Dist: jax-ep-{extra}=={release}; extra == "{extra}"\n'
        metadata = metadata.replace(line, line + pin)
    return metadata


def host_files(files: Files, release: str) -> Files:
    """Returns a wheel without CUDA with the requirements of a release."""
    name = f"jax_ep-{release}.dist-info/METADATA"
    return files | {name: pin_plugins(files[name].decode(), release).encode()}


def plugin_files(files: Files, release: str, major: int) -> Files:
    """Takes the package of the kernels out of a wheel with CUDA."""
    local = f"jax_ep-{release}+cu{major}.dist-info"
    if f"{local}/METADATA" not in files:
        raise ReleaseError(f"expected a wheel of jax_ep {release}+cu{major}. Run `make wheel`")
    package, name = f"jax_ep_cuda{major}", f"jax-ep-cuda{major}"
    info = f"{package}-{release}.dist-info"
    # Requires jax-ep, so that pip says which package stays behind when only the other is updated.
    metadata = f"""Metadata-Version: 2.4
Name: {name}
Version: {release}
Summary: CUDA {major} kernels of jax-ep
License-Expression: Apache-2.0
License-File: LICENSE
Classifier: Operating System :: POSIX :: Linux
Requires-Python: >=3.12
Requires-Dist: jax-ep=={release}
Description-Content-Type: text/markdown

The CUDA {major} kernels of [jax-ep](https://pypi.org/project/jax-ep/), which has the Python code
and the documentation. Install both by `pip install "jax-ep[cuda{major}]"`.
"""
    return {
        f"{package}/__init__.py": f'"""{metadata.splitlines()[3][9:]}."""\n\n'
        f'__version__ = "{release}"\n'.encode(),
        f"{package}/_ffi.abi3.so": files["jax_ep/_ffi.abi3.so"],
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": files[f"{local}/WHEEL"],
        f"{info}/licenses/LICENSE": files[f"{local}/licenses/LICENSE"],
    }


# ---- checks


def check_size(path: pathlib.Path, kind: str) -> None:
    """Refuses a file that has become larger than a file of its kind may be."""
    mib = path.stat().st_size / 2**20
    if mib > MAX_MIB[kind]:
        raise ReleaseError(f"{path.name} has {mib:.1f} MiB; at most {MAX_MIB[kind]} are expected")


def check_tag(name: str) -> None:
    """Refuses a wheel that only new systems would install, or one for a single Python."""
    glibc = [(int(a), int(b)) for a, b in re.findall(r"manylinux_(\d+)_(\d+)_", name)]
    if "-cp312-abi3-" not in name:
        raise ReleaseError(f"{name} is not for the stable ABI: expected the tag cp312-abi3")
    if not glibc or min(glibc) > NEWEST_GLIBC:
        raise ReleaseError(
            f"{name} should be for manylinux_{NEWEST_GLIBC[0]}_{NEWEST_GLIBC[1]} or older. "
            "`objdump -T` of its module shows the symbols of newer versions: ffi/old_glibc.cc"
        )


def check_contents(files: Iterable[str], expected: Iterable[str]) -> None:
    """Refuses files that are missing, and files that are too many."""
    missing, more = sorted({*expected} - {*files}), sorted({*files} - {*expected})
    if missing or more:
        raise ReleaseError(f"missing files: {missing}; files that do not belong there: {more}")


def expected_files(release: str, sources: Iterable[str]) -> set[str]:
    """Returns what the wheel without CUDA has: the package's sources, the module, metadata."""
    info = f"jax_ep-{release}.dist-info"
    package = {name for name in sources if name.startswith("jax_ep/")}
    metadata = {f"{info}/METADATA", f"{info}/WHEEL", f"{info}/licenses/LICENSE"}
    return package | metadata | {"jax_ep/_ffi.abi3.so"}


def check_sdist(path: pathlib.Path, sources: Iterable[str]) -> None:
    """Refuses sources that are not those of the checkout, apart from CI's."""
    with tarfile.open(path) as archive:
        files = [m.name.partition("/")[2] for m in archive.getmembers() if not m.isdir()]
    ours = {name for name in sources if not name.startswith((".ci/", ".github/"))}
    check_contents(files, ours | {"PKG-INFO"})
