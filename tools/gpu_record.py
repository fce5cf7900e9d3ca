"""Keeps tests/gpu_record.json: on which kernels, machine and packages the GPU tests last passed.

  tools/gpu_record.py add TIER REPORT...   adds a tier's run from pytest's JUnit reports
  tools/gpu_record.py check BUILD          says whether the record is of this build's machine code
  tools/gpu_record.py show                 prints what `add` would record about this machine
  tools/gpu_record.py nvcc                 prints pip's constraints for the record's compiler

`add` begins a new record if the present one is of other kernels, packages or devices. It fails if
a test failed or was skipped, or a report is missing.

`check` takes a wheel or a shared library. Its exit status is 0 if the kernels are those on record,
1 if they are not or if a test failed with them, and 2 if that cannot be said, because another
compiler made them. The hashes of
each tier's host C++ and Python sources are information: a record does not become stale when only
they differ.

A machine without pyelftools and cuobjdump takes the digest from a file:
`tools/machine_code.py digest BUILD --write FILE` makes it where the wheel is built. MACHINE_CODE
names it (default dist/machine_code.json). It counts only for the library that it was made from.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import xml.etree.ElementTree
from collections.abc import Iterable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import machine_code
from cubin import NoMachineCodeError

ROOT = pathlib.Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "gpu_record.json"
PACKAGES = ("jax_ep", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "numpy")
# The packages of pip's CUDA compiler that decide on machine code, and those that need its release.
NVCC_PACKAGES = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm")
NVCC_COMPANIONS = ("nvidia-cuda-runtime", "nvidia-cuda-cccl")


# ---- what a record is of


def sources() -> dict[str, str]:
    """Returns the hashes of the sources that are not machine code, without the benchmarks."""
    host = [*ROOT.glob("ffi/**/*.cc"), *ROOT.glob("ffi/**/*.h"), *ROOT.glob("cmake/*")]
    bench = ROOT / "jax_ep" / "bench"
    python = [path for path in ROOT.glob("jax_ep/**/*.py") if bench not in path.parents]
    return {"host": _hash([ROOT / "CMakeLists.txt", *host]), "python": _hash(python)}


def _hash(paths: Iterable[pathlib.Path]) -> str:
    content = hashlib.sha256()
    for path in sorted(paths):
        content.update(f"{path.relative_to(ROOT).as_posix()} {path.stat().st_size}\n".encode())
        content.update(path.read_bytes())
    return content.hexdigest()[:16]


def installed_machine_code() -> dict[str, str]:
    """Returns the digest and the compiler of the installed module's kernels.

    Raises:
      NoMachineCodeError: the digest cannot be computed here, and no file has it.
    """
    from jax_ep import _ffi

    library = pathlib.Path(_ffi.__file__)
    try:
        found = machine_code.describe(library)
    except NoMachineCodeError as error:
        found = _carried_machine_code(library, error)
    return {"digest": found["digest"], "compiler": found["compiler"]}


def _carried_machine_code(library: pathlib.Path, reason: Exception) -> dict[str, str]:
    carried = pathlib.Path(os.environ.get("MACHINE_CODE", ROOT / "dist" / "machine_code.json"))
    remedy = "write it where the wheel was built: tools/machine_code.py digest BUILD --write FILE"
    if not carried.exists():
        raise NoMachineCodeError(f"{reason}. {carried} does not exist; {remedy}")
    found: dict[str, str] = json.loads(carried.read_text())
    if found["library"] != hashlib.sha256(library.read_bytes()).hexdigest():
        raise NoMachineCodeError(f"{carried} is not of {library}; {remedy}")
    return found


def machine() -> dict[str, Any]:
    """Returns what the tests run on and with."""
    import jax_ep

    gpus = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    )
    name, driver = gpus.stdout.splitlines()[0].split(", ")
    versions = {"python": platform.python_version(), "cuda": jax_ep.build_info()["cuda_version"]}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "machine_code": installed_machine_code(),
        "device": name,
        "driver": driver,
        "versions": versions,
        "implementation": "cuda",
    }


# ---- commands


def counts(reports: list[pathlib.Path]) -> dict[str, Any]:
    """Returns tests by outcome. A missing report (its pytest was killed) counts as a failure."""
    found = {"passed": 0, "failed": 0, "skipped": 0}
    seconds = 0.0
    for report in reports:
        if not report.exists():
            found["failed"] += 1
            continue
        for suite in xml.etree.ElementTree.parse(report).getroot().iter("testsuite"):
            failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            skipped = int(suite.get("skipped", 0))
            found["failed"] += failed
            found["skipped"] += skipped
            found["passed"] += int(suite.get("tests", 0)) - failed - skipped
            seconds += float(suite.get("time", 0))
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {**found, "seconds": round(seconds), "date": today}


def merged(record: dict[str, Any], here: dict[str, Any], tier: str, tests: Any) -> dict[str, Any]:
    """Returns the record with this tier. Other tiers stay if they ran on and with the same."""
    same = all(record.get(name) == value for name, value in here.items())
    tiers = {**(record.get("tiers", {}) if same else {}), tier: tests}
    return {**here, "tiers": dict(sorted(tiers.items()))}


def add(tier: str, reports: list[pathlib.Path]) -> int:
    """Puts a tier's run on record. Returns the exit status: 1 if not every test passed."""
    tests = counts(reports) | {"sources": sources()}
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    RECORD.write_text(json.dumps(merged(record, machine(), tier, tests), indent=2) + "\n")
    print(f"{tier}: {tests}, on record in {RECORD}")
    return int(tests["failed"] or tests["skipped"] or not tests["passed"])


def check(found: dict[str, str]) -> int:
    """Compares a build's kernels with the record.

    Returns 0: equal, and all tests passed; 1: stale, or some did not pass; 2: cannot tell.
    """
    record = json.loads(RECORD.read_text())
    recorded = record["machine_code"]
    if found["digest"] == recorded["digest"]:
        tiers = ", ".join(_tier(name, tests) for name, tests in record["tiers"].items())
        failed = any(tests["failed"] for tests in record["tiers"].values())
        outcome = "ran, and some failed," if failed else "passed"
        print(f"The GPU tests {outcome} with these kernels on {record['device']}: {tiers}.")
        return int(failed)
    if found["compiler"] != recorded["compiler"]:
        print(
            "Cannot tell whether the GPU record is stale: its kernels were compiled by "
            f"{recorded['compiler']!r}, these by {found['compiler']!r}."
        )
        return 2
    print(
        f"The GPU record is stale: it has kernels {recorded['digest']}, and these are "
        f"{found['digest']}. Run `make gpu_test` on a machine with GPUs."
    )
    return 1


def _tier(name: str, tests: dict[str, Any]) -> str:
    then = tests["sources"]
    changed = [kind for kind, value in sources().items() if then.get(kind) != value]
    since = f"; {' and '.join(changed)} sources changed since" if changed else ""
    failed = (
        f"; {tests['failed']} of {tests['passed'] + tests['failed']} failed"
        if tests["failed"]
        else ""
    )
    return f"{name} ({tests['date']}{failed}{since})"


def nvcc_constraints() -> str:
    """Returns pip's constraints for the compiler that made the kernels on record."""
    compiler = json.loads(RECORD.read_text())["machine_code"]["compiler"]
    (version,) = re.findall(r"\bV([0-9.]+)", compiler)
    release = version.rpartition(".")[0]
    lines = [f"{package}=={version}" for package in NVCC_PACKAGES]
    return "\n".join([*lines, *(f"{package}=={release}.*" for package in NVCC_COMPANIONS)])


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status; the module's text says what it means."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    subparser = commands.add_parser("add")
    subparser.add_argument("tier")
    subparser.add_argument("reports", nargs="+", type=pathlib.Path)
    commands.add_parser("check").add_argument("build", type=pathlib.Path)
    commands.add_parser("show")
    commands.add_parser("nvcc")
    options = parser.parse_args(arguments)
    try:
        if options.command == "add":
            return add(options.tier, options.reports)
        if options.command == "check":
            return check(machine_code.describe(options.build))
        print(nvcc_constraints() if options.command == "nvcc" else json.dumps(machine(), indent=2))
    except NoMachineCodeError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
