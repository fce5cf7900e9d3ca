"""``python -m jax_ep.doctor [--json]``: what is installed, what runs here, and why.

Looks at packages, driver, GPUs and how they reach each other, then runs one dispatch,
grouped_matmul and combine over the local devices in a process of its own, with a deadline of 20 s.

Exit status: 0 if the CUDA path was verified, 1 if something is broken (with the cause and what to
do), 2 if there is no GPU and the pure-JAX implementation was verified.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

from jax_ep.doctor import layer, probes

LARGEST_ERROR = 1e-4  # relative; float32 throughout

Facts = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The meaning of the facts."""

    exit_status: int
    summary: str
    advice: str = ""


def collect() -> Facts:
    """The facts, as JSON values: of the machine, and of a trial on its devices as "trial"."""
    facts = probes.collect()
    facts["trial"] = layer.run()
    return facts


def judge(facts: Facts) -> Verdict:
    """The verdict on the facts of `collect`."""
    trial = facts["trial"]
    works = (
        trial["stage"] == "done"
        and trial["largest_error"] is not None
        and trial["largest_error"] < LARGEST_ERROR
    )
    if works and trial["platform"] in ("gpu", "cuda") and trial["implementation"] == "cuda":
        return Verdict(0, "the CUDA path is verified")
    for cause in CAUSES:
        verdict = cause(facts)
        if verdict is not None:
            return verdict
    if works:
        return Verdict(2, "no GPU: the pure-JAX implementation is verified")
    return what_happened(trial)


# ---- causes, what explains most first; each returns None where it is not the case


def broken(summary: str, advice: str) -> Verdict:
    """A cause and what to do."""
    return Verdict(1, summary, advice)


def has_gpu(facts: Facts) -> bool:
    """Whether NVML lists a GPU, or device files exist where NVML cannot be asked."""
    numbered = [n for n in facts["container"]["device_files"] if n.removeprefix("nvidia").isdigit()]
    return bool(facts["gpus"] or numbered)


def wheel_without_cuda(facts: Facts) -> Verdict | None:
    """The wheel for CPUs on a machine with a GPU."""
    if not has_gpu(facts) or facts["build"]["cuda"]:
        return None
    return broken(
        "there is a GPU, but this wheel of jax_ep has no CUDA kernels",
        "Install them: pip install 'jax-ep[cuda13]', or [cuda12] for CUDA 12. A checkout has them "
        "if it is built where an nvcc is found.",
    )


def no_device_files(facts: Facts) -> Verdict | None:
    """A container that was not given the GPUs of its host."""
    container = facts["container"]
    expected = container["driver_module"] or facts["environment"].get("NVIDIA_VISIBLE_DEVICES")
    missing = [f"/dev/{name}" for name in container["missing_device_files"]]
    if has_gpu(facts):
        if not missing:
            return None
    elif expected in (None, False, "", "void", "none"):
        return None
    else:
        missing = ["/dev/nvidia0", *missing]
    return broken(
        f"the device files {', '.join(missing)} are missing in this container",
        "Start it with GPUs: docker run --gpus all (or --device for each file), with the NVIDIA "
        "container toolkit installed on the host.",
    )


def old_driver(facts: Facts) -> Verdict | None:
    """A driver that is too old for the build, or none that can be loaded."""
    if not has_gpu(facts) or not facts["driver_problem"]:
        return None
    installed = f" (driver {facts['driver']})" if facts["driver"] else ""
    return broken(
        f"{facts['driver_problem']}{installed}",
        "Update the NVIDIA driver, or install the wheels of jax and jax_ep for an older CUDA.",
    )


def jax_without_cuda(facts: Facts) -> Verdict | None:
    """JAX that runs on the CPU of a machine with a GPU."""
    platform = facts["trial"].get("platform")
    if not has_gpu(facts) or platform is None or platform in ("gpu", "cuda"):
        return None
    summary = f"there is a GPU, but JAX runs on {platform}"
    chosen = facts["environment"].get("JAX_PLATFORMS")
    if chosen:
        return broken(f"{summary}: JAX_PLATFORMS={chosen}", "Unset JAX_PLATFORMS.")
    for name, version in facts["versions"].items():
        if version and name.startswith("jax-cuda"):
            return broken(
                f"{summary}, though {name} is installed",
                "See why it does not start: python -c \"import jax; jax.devices('cuda')\".",
            )
    return broken(
        summary, "Install JAX for it: pip install 'jax-ep[cuda13]', or [cuda12] for CUDA 12."
    )


def no_code_for_the_gpu(facts: Facts) -> Verdict | None:
    """An architecture that the build has no code for, or a GPU that runs nothing at all."""
    for device in facts["trial"].get("probes", ()):
        if device["error"]:
            return broken(
                f"GPU {device['ordinal']} ({device['name']}) runs no kernel: {device['error']}",
                "Build jax_ep for it (CMAKE_CUDA_ARCHITECTURES), or use another GPU "
                "(CUDA_VISIBLE_DEVICES).",
            )
    return None


def chosen_otherwise(facts: Facts) -> Verdict | None:
    """The environment asks for the other implementation."""
    trial = facts["trial"]
    if trial.get("platform") not in ("gpu", "cuda") or trial.get("implementation") != "xla":
        return None
    return broken(
        f"this GPU runs the pure-JAX implementation: {trial['reason']}",
        "Unset JAX_EP_IMPLEMENTATION.",
    )


def in_mig_mode(facts: Facts) -> Verdict | None:
    """Slices of a GPU cannot map each other's memory."""
    for index, gpu in enumerate(facts["gpus"]):
        if gpu["mig"]:
            return broken(
                f"GPU {index} ({gpu['name']}) is in MIG mode: its slices cannot reach each other",
                "Use whole GPUs (an administrator turns MIG off by nvidia-smi -mig 0), or one "
                "slice alone.",
            )
    return None


def no_peer_access(facts: Facts) -> Verdict | None:
    """A pair of GPUs that cannot access each other's memory."""
    for a, row in enumerate(facts["peers"]):
        for b, access in enumerate(row):
            if access not in ("self", "NVLink", "yes"):
                return broken(
                    f"GPUs {a} and {b} cannot access each other's memory: {access}",
                    "Choose GPUs that can (nvidia-smi topo -p2p r shows which) by "
                    "CUDA_VISIBLE_DEVICES; in a virtual machine ask for peer access, and turn off "
                    "the IOMMU's ACS. JAX_EP_IMPLEMENTATION=xla runs without it.",
                )
    return None


def container_limits(facts: Facts) -> Verdict | None:
    """Too little shared or locked memory, where the trial did not come to its end."""
    container, trial = facts["container"], facts["trial"]
    if not has_gpu(facts) or trial["stage"] == "done":
        return None
    shm, locked = container["shm_bytes"], container["locked_memory_bytes"]
    happened = what_happened(trial).summary
    if shm <= probes.SMALL_SHM_BYTES:
        return broken(
            f"{happened}; /dev/shm has {shm >> 20} MiB, which is too little for NCCL",
            "Start the container with --shm-size=1g, or --ipc=host.",
        )
    if locked is not None and locked <= probes.SMALL_LOCKED_BYTES:
        return broken(
            f"{happened}; only {locked >> 10} KiB of memory can be locked",
            "Start the container with --ulimit memlock=-1, or raise `ulimit -l`.",
        )
    return None


CAUSES: tuple[Callable[[Facts], Verdict | None], ...] = (
    wheel_without_cuda,
    no_device_files,
    old_driver,
    jax_without_cuda,
    no_code_for_the_gpu,
    chosen_otherwise,
    in_mig_mode,
    no_peer_access,
    container_limits,
)


def what_happened(trial: Facts) -> Verdict:
    """The trial's own end, where nothing explains it."""
    advice = "JAX_EP_IMPLEMENTATION=xla runs the pure-JAX implementation instead."
    advice = advice if trial.get("implementation") == "cuda" else ""
    if trial["stage"] == "done":
        error = trial["largest_error"]
        wrong = "NaN" if error is None else f"wrong by {error:.2g}"
        return broken(f"a small layer is {wrong}", advice)
    if trial["timed_out"]:
        return broken(f"a small layer does not end (stage {trial['stage']!r})", advice)
    last = trial["stderr"].strip().splitlines()
    said = f": {last[-1]}" if last else ""
    return broken(f"a small layer fails (stage {trial['stage']!r}, {trial['ended']}){said}", advice)


# ---- the report


def report(facts: Facts, verdict: Verdict) -> str:
    """The facts, one per line, the peer matrix, and the verdict."""
    lines = [f"{name:18}{_text(value)}" for name, value in facts.items() if name != "peers"]
    if facts["peers"]:
        lines.append("peers")
        lines += [f"  GPU {a}: " + ", ".join(row) for a, row in enumerate(facts["peers"])]
    return "\n".join([*lines, "", f"{verdict.summary}. {verdict.advice}".rstrip()])


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_text(v)}" for k, v in value.items() if v not in (None, ""))
    if isinstance(value, list):
        return "; ".join(_text(v) for v in value) or "none"
    return str(value)


def main() -> int:
    """Prints the report."""
    parser = argparse.ArgumentParser(prog="python -m jax_ep.doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args().json
    facts = collect()
    verdict = judge(facts)
    if as_json:
        print(json.dumps({**facts, "verdict": dataclasses.asdict(verdict)}, indent=2))  # noqa: T201
    else:
        print(report(facts, verdict))  # noqa: T201
    return verdict.exit_status


if __name__ == "__main__":
    sys.exit(main())
