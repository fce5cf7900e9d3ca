"""Puts a run of a GPU tier on record: tests/gpu_record.json, from pytest's JUnit reports.

tools/gpu_record.py TIER REPORT... adds the tier to the record, or begins a new one if the record
is of other sources, packages or devices. Fails if a test failed or was skipped, or a report is
missing.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import pathlib
import platform
import subprocess
import sys
import xml.etree.ElementTree
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "gpu_record.json"
PACKAGES = ("jax_ep", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "numpy")


def output(*command: str) -> str:
    """What a command prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def machine() -> dict[str, Any]:
    """What the tests ran on and with."""
    import jax_ep

    gpus = output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    name, driver = gpus.splitlines()[0].split(", ")
    versions = {"python": platform.python_version(), "cuda": jax_ep.build_info()["cuda_version"]}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "sources": output(str(ROOT / "tools" / "source_digest.sh")),
        "device": name,
        "driver": driver,
        "versions": versions,
        "implementation": "cuda",
    }


def counts(reports: list[pathlib.Path]) -> dict[str, int | str]:
    """Tests by outcome. A report that is not there (its pytest was killed) counts as a failure."""
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
    """The record with this tier; the other tiers stay if they ran on and with the same."""
    same = all(record.get(name) == value for name, value in here.items())
    tiers = {**(record.get("tiers", {}) if same else {}), tier: tests}
    return {**here, "tiers": dict(sorted(tiers.items()))}


def main(tier: str, *reports: str) -> int:
    """The exit status: 1 if not every test passed."""
    tests = counts([pathlib.Path(report) for report in reports])
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    RECORD.write_text(json.dumps(merged(record, machine(), tier, tests), indent=2) + "\n")
    print(f"{tier}: {tests}, on record in {RECORD}")
    return int(tests["failed"] or tests["skipped"] or not tests["passed"])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
