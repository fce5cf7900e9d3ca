"""The compiled module, its FFI registrations, workspaces, and reports of failures at run time."""

from __future__ import annotations

import atexit
import functools
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.extend.backend

from jax_ep._src.core import extension, network
from jax_ep._src.core.errors import Error, PeerTimeoutError

if TYPE_CHECKING:
    from jax_ep import _ffi
else:
    _ffi = extension.module

logger = logging.getLogger("jax_ep")
logger.addHandler(logging.NullHandler())

LIMITS: Mapping[str, int] = _ffi.limits()
"""The most that the kernels take: num_ranks, top_k, num_experts, and items, which are rows,
assignments or columns. Rows are multiples of vector_bytes.
"""


def register_ffi_targets() -> None:
    """Tells JAX about the CUDA handlers of this build. Starts no backend."""
    for name, type_capsules in _ffi.type_registrations().items():
        jax.ffi.register_ffi_type(name, type_capsules, platform="CUDA")
    for target, handlers in _ffi.registrations().items():
        jax.ffi.register_ffi_target(target, handlers, platform="CUDA")


register_ffi_targets()
NETWORK_PROBLEM = network.join_domains()
"""Why NVLink domains of several hosts are not joined by a network; None if they are."""

# Runs before JAX's own clean-up, which waits for the devices: jax is imported first.
atexit.register(_ffi.shutdown)
# A fork has neither the devices nor the peers of its parent.
os.register_at_fork(after_in_child=functools.partial(atexit.unregister, _ffi.shutdown))


class _Meshes:
    """The meshes that span processes, as a cache that JAX clears together with its backends."""

    @staticmethod
    def cache_clear() -> None:
        # jax.clear_caches() comes here, too, but ends no communicator.
        if not jax.distributed.is_initialized():
            _ffi.forget_meshes()


jax.extend.backend.register_backend_cache(_Meshes, "jax_ep's meshes of several processes")


def build_info() -> dict[str, Any]:
    """Describes the compiled module.

    For example::

        has_kernels = jax_ep.build_info()["cuda"]

    Returns:
      A dict with at least ``version``, ``cuda`` (whether CUDA kernels are in this build),
      ``cuda_version`` (of the toolkit, or None), ``cuda_architectures`` (e.g. ``["sm_80",
      "sm_90a", "compute_90"]``) and ``profile`` (whether kernels can record for `profile`).
    """
    return _ffi.build_info()


def num_sms() -> int:
    """Returns the SMs of this process's GPUs, 0 without one."""
    device = jax.devices()[0]
    return getattr(device, "core_count", 0) or 0 if device.platform == "gpu" else 0


def gpu_kind() -> str:
    """Returns what JAX calls this process's GPUs, such as "NVIDIA H200"; empty without one."""
    try:
        return str(jax.local_devices(backend="cuda")[0].device_kind)
    except RuntimeError:
        return ""


def has_cuda() -> bool:
    """Whether this build has CUDA handlers."""
    return bool(_ffi.build_info()["cuda"])


def compute_capabilities() -> set[str]:
    """Returns those of this process's GPUs, such as "9.0"; empty without a GPU or a backend."""
    try:
        return {str(device.compute_capability) for device in jax.local_devices(backend="cuda")}
    except RuntimeError:
        return set()


def workspace_buffers(
    num_tokens: int,
    hidden: int,
    top_k: int,
    num_experts: int,
    num_ranks: int,
    itemsize: int,
    domain_size: int | None = None,
) -> dict[str, int]:
    """Returns the bytes of a rank's workspace by the buffer's name.

    Workspaces are made at the first call on CUDA and shared by all calls of one group. The size
    follows from static shapes alone. It is empty for calls that `domains_problem` refuses.

    Raises:
      ValueError: a size is not positive, or the experts do not divide by the ranks.
    """
    sizes = (num_tokens, hidden, top_k, num_experts, num_ranks, itemsize, domain_size or 0)
    return dict(_ffi.workspace_buffers(*sizes))


def domains_problem(
    num_tokens: int, row_bytes: int, top_k: int, num_experts: int, num_ranks: int, domain_size: int
) -> str | None:
    """Returns why the kernels do not take a call over NVLink domains; None if they do."""
    sizes = (num_tokens, row_bytes, top_k, num_experts, num_ranks, domain_size)
    return _ffi.domains_problem(*sizes) or None


def check() -> None:
    """Raises the first failure on this process's devices since the last check, if there is one.

    Block on results first, because those that are still being computed may fail after the check.

    For example::

        jax.block_until_ready(y)
        jax_ep.check()

    Raises:
      PeerTimeoutError: a rank waited for a peer until the deadline.
      Error: ranks ran different calls at the same time, `release` came between them, or the host
        ended the calls because a device had failed.
    """
    reports = _ffi.take_reports()
    if not reports:
        return
    rank, peer, phase, sequence_number, message = reports[0]
    if phase == "host":
        raise Error(message)
    operation, _, failure = phase.rpartition(".")
    if failure == "mismatch":
        raise Error(
            f"rank {rank} ran {operation} (sequence number {sequence_number}) while rank "
            f"{peer} ran another call, or the same with other shapes. {AFTERWARDS}"
        )
    if failure == "concurrent":
        raise Error(
            f"rank {rank} began {operation} (sequence number {sequence_number}) while another call "
            "of the same ranks was running. The calls of a rank group must follow each other on "
            "every device: do not put them on streams of their own (compute_on), or into branches "
            f"of a graph that run at the same time. {AFTERWARDS}"
        )
    if failure == "workspace":
        raise Error(
            f"rank {rank} had no workspace for {operation} (sequence number {sequence_number}): "
            f"it was released while calls were running. {AFTERWARDS}"
        )
    raise PeerTimeoutError(rank, peer, phase, sequence_number)


AFTERWARDS = (
    "Every later call of this generation returns NaN at once. Find out why, then call "
    "jax_ep.release() on every rank to start again."
)


def release() -> int:
    """Frees the workspaces and starts a new generation. Collective: call it on every process.

    It waits for what runs on the devices, but ends a call that waits for a peer for longer than
    JAX_EP_WARN_AFTER_S, or for a device that has failed, and a call that another thread starts
    meanwhile. These calls return NaN. The next call makes its workspace again; compiled programs
    and CUDA graphs stay valid.

    For example::

        freed_bytes = jax_ep.release()

    Returns:
      The bytes freed on this process's devices.
    """
    _ffi.take_reports()
    return _ffi.release_workspaces()
