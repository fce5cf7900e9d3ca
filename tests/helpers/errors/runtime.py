"""Mistakes around the operations (import, check, tune, memory, profile): calls, by the class of their error."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import types
import unittest.mock

import testing  # isort: skip

import jax
import jax.numpy as jnp

import jax_ep
from errors.common import RANKS
from jax_ep._src.core import extension
from jax_ep._src.profile import profile as profile_module


def profile(devices=("cuda",), problem="", **options):
    """A profile by a build whose kernels record, on devices that are not there."""
    recording = {
        "build_info": lambda: {"profile": True},
        "start_profile": lambda *arguments: problem,
        "stop_profile": lambda: ("", []),
        "profile_names": lambda: {},
    }
    local_devices = [types.SimpleNamespace(local_hardware_id=i) for i, _ in enumerate(devices)]
    with (
        unittest.mock.patch.object(profile_module, "_ffi", types.SimpleNamespace(**recording)),
        unittest.mock.patch.object(jax, "local_devices", lambda backend: local_devices),
        tempfile.TemporaryDirectory() as folder,
        jax_ep.profile(folder, **options) as recorded,
    ):
        pass
    return recorded


def profile_without_gpu():
    build = types.SimpleNamespace(build_info=lambda: {"profile": True})
    no_backend = unittest.mock.patch.object(jax, "local_devices", side_effect=RuntimeError)
    with unittest.mock.patch.object(profile_module, "_ffi", build), no_backend:
        jax_ep.profile("folder").__enter__()


def picture_without_matplotlib():
    with unittest.mock.patch.dict(sys.modules, {"jax_ep._src.profile.picture": None}):
        _ = profile().picture


def tune_on(gpu="a GPU", top_k=2, **options):
    """Calls tune as on a machine of that GPU; none if the name is empty."""
    with unittest.mock.patch.object(jax_ep._src.core.runtime, "gpu_kind", lambda: gpu):
        jax_ep.tune("unwritten.json", 8, 8, num_experts=RANKS, top_k=top_k, **options)


def import_without_module():
    """In a fresh Python in which jax_ep._ffi cannot be imported."""
    code = "import sys; sys.modules['jax_ep._ffi'] = None; import jax_ep"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    message = re.search(r"MissingExtensionError: (.*)", result.stderr)
    assert message, result.stderr
    raise jax_ep.MissingExtensionError(message[1])


def load_plugin(version):
    """Finds a plugin of a version, whose compiled module cannot be imported."""
    with testing.plugin_package(version, "raise ImportError('a reason')"):
        extension.plugin_module("0.1.0")


def fail(phase="entry"):
    assert jax_ep._src.core.runtime._ffi.post_report(1, 2, f"dispatch.{phase}", 3)
    jax_ep.check()


PRODUCERS = {
    "ArgumentError": [
        lambda: tune_on(mesh=testing.mesh_of((2, 2), ("data", "expert"))),
        lambda: tune_on(top_k=RANKS + 1),
        lambda: jax_ep.use_tuning("/no/such/file"),
        lambda: jax_ep.memory(8, 64, 32, 8, 2, 2**10),
        lambda: profile(max_records=0),
        lambda: profile(max_records=2**24 + 1),
    ],
    "DtypeError": [
        lambda: jax_ep.memory(8, 64, 32, 8, 2, 4, dtype=jnp.int32),
        lambda: jax_ep.memory(8, 64, 32, 8, 2, 4, activation=jax.nn.silu),
    ],
    "UnavailableError": [
        lambda: tune_on(gpu=""),
        lambda: jax_ep.profile("folder").__enter__(),
        profile_without_gpu,
    ],
    "MissingExtensionError": [
        import_without_module,
        picture_without_matplotlib,
        lambda: load_plugin("0.0.9"),
        lambda: load_plugin("0.1.0"),
    ],
    "PeerTimeoutError": [fail],
    "Error": [
        lambda: fail("mismatch"),
        lambda: fail("concurrent"),
        lambda: fail("workspace"),
        lambda: profile(problem="another profile is being recorded"),
    ],
}
