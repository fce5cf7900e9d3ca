"""``python -m jax_ep.doctor [--json]``: what is installed, what runs here, and why.

Exit status: 0 if the CUDA path was verified, 1 if something is broken (with the cause and what to
do), 2 if there is no GPU and the pure-JAX implementation was verified.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

import jax_ep
from jax_ep import _ffi, runtime

PACKAGES = ("jax-ep", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "numpy")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the facts mean."""

    exit_status: int
    summary: str
    advice: str = ""


def collect() -> dict[str, Any]:
    """The facts, as JSON values. Starts JAX's backend and runs a small layer on all its devices."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "location": os.path.dirname(jax_ep.__file__),
        "build": jax_ep.build_info(),
        "environment": {k: v for k, v in os.environ.items() if k.startswith("JAX_EP_")},
        "gpus": _ffi.probe_devices(),
    }
    try:
        facts["platform"] = jax.default_backend()
        facts["devices"] = [str(device) for device in jax.devices()]
        facts["implementation"], facts["reason"] = _implementation(facts["platform"])
        facts["largest_error"] = largest_error()
    except Exception as error:  # noqa: BLE001  Whatever it is, the report is about it.
        facts["error"] = f"{type(error).__name__}: {error}"
    return facts


def judge(facts: dict[str, Any]) -> Verdict:
    """The verdict on the facts of `collect`."""
    if "error" in facts:
        return Verdict(
            1,
            f"a small layer fails here: {facts['error']}",
            "JAX_EP_IMPLEMENTATION=xla runs the pure-JAX implementation instead."
            if facts.get("implementation") == "cuda"
            else "",
        )
    if not facts["largest_error"] < 1e-4:
        return Verdict(1, f"a small layer is wrong by {facts['largest_error']:.2g}")
    if facts["platform"] in ("gpu", "cuda"):
        if facts["implementation"] != "cuda":
            return Verdict(
                1,
                f"this GPU runs the pure-JAX implementation: {facts['reason']}",
                "Install the wheel for your CUDA (jax-ep +cu13 or +cu12), and unset "
                "JAX_EP_IMPLEMENTATION.",
            )
        return Verdict(0, "the CUDA path is verified")
    if facts["gpus"]:
        return Verdict(
            1,
            f"there is a GPU, but JAX runs on {facts['platform']}",
            "Install JAX for it: pip install 'jax-ep[cuda13]', or [cuda12] for CUDA 12.",
        )
    return Verdict(2, "no GPU: the pure-JAX implementation is verified")


def largest_error() -> float:
    """Of a small layer over all local devices, against every expert applied to every token."""
    num_ranks, hidden, top_k = jax.local_device_count(), 16, 2
    num_tokens, num_experts = 8 * num_ranks, 2 * num_ranks
    mesh = jax.make_mesh(
        (num_ranks,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.local_devices()
    )
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_tokens, hidden)).astype(np.float32)
    ids = rng.integers(0, num_experts, (num_tokens, top_k)).astype(np.int32)
    weights = rng.random((num_tokens, top_k)).astype(np.float32)
    matrices = rng.normal(size=(num_experts, hidden, hidden)).astype(np.float32)

    def layer(x: jax.Array, ids: jax.Array, weights: jax.Array, matrices: jax.Array) -> jax.Array:
        rows, row_weights, group_sizes, plan = jax_ep.dispatch(
            x, ids, weights, num_experts=num_experts, axis_name="expert"
        )
        y = jax_ep.grouped_matmul(rows, matrices, group_sizes)
        return jax_ep.combine(y, plan, row_weights)

    spec = PartitionSpec("expert")
    y = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=spec, out_specs=spec))(
        *(jnp.asarray(a) for a in (x, ids, weights, matrices))
    )
    expected = np.einsum("tk,tkj->tj", weights, np.einsum("ti,tkij->tkj", x, matrices[ids]))
    return float(np.abs(np.asarray(y) - expected).max() / np.abs(expected).max())


def _implementation(backend: str) -> tuple[str, str]:
    chosen = runtime.resolve_implementation("doctor", None)
    if chosen is not None:
        return chosen, f"JAX_EP_IMPLEMENTATION={chosen}"
    if backend not in ("gpu", "cuda"):
        return "xla", f"the platform is {backend}"
    if not runtime.has_cuda():
        return "xla", "this build of jax_ep has no CUDA kernels"
    return "cuda", "the platform is CUDA"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


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
        for name, value in facts.items():
            text = (
                ", ".join(f"{k} {v}" for k, v in value.items() if v is not None)
                if (isinstance(value, dict))
                else value
            )
            print(f"{name:16}{text}")  # noqa: T201
        print(f"\n{verdict.summary}. {verdict.advice}".rstrip())  # noqa: T201
    return verdict.exit_status


if __name__ == "__main__":
    sys.exit(main())
