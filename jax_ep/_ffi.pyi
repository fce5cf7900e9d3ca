"""The compiled half of jax_ep. Private: use the functions of jax_ep."""

from collections.abc import Sequence
from typing import Any

def registrations() -> dict[str, dict[str, Any]]:
    """
    Handler capsules by custom-call target and stage; empty in a build without CUDA.
    """

def type_registrations() -> dict[str, Any]:
    """
    Capsules of the handlers' state types, to be registered before the targets.
    """

def build_info() -> dict[str, Any]:
    """
    version, cuda, cuda_version or None, cuda_architectures, compiler, profile.
    """

def limits() -> dict[str, int]:
    """The kernels' limits. Rows are multiples of vector_bytes."""

def workspace_buffers(
    num_tokens: int,
    hidden: int,
    top_k: int,
    num_experts: int,
    num_ranks: int,
    row_bytes_per_element: int,
    domain_size: int,
) -> dict[str, int]:
    """
    Bytes of a rank's workspace by buffer. ValueError for sizes that make no sense.
    """

def domains_problem(
    num_tokens: int, row_bytes: int, top_k: int, num_experts: int, num_ranks: int, domain_size: int
) -> str:
    """
    Why the kernels do not take a call over NVLink domains, or an empty string.
    """

def driver_problem() -> str:
    """
    Why the installed NVIDIA driver cannot run this build's kernels, or an empty string.
    """

def probe_devices() -> list[dict[str, Any]]:
    """
    Runs a small kernel on every GPU; see kernels/probe.h. Empty if there is none.
    """

def use_ucx(folder: str) -> str:
    """
    Joins NVLink domains by UCX, before there are groups. Returns what is wrong, or "".
    """

def use_nvshmem(folder: str) -> str:
    """
    Joins NVLink domains by NVSHMEM, before there are groups. Returns what is wrong, or "".
    """

def profile_names() -> dict[str, list[str]]:
    """
    kernels, spans, and the waits that spans add up, by the numbers in records.
    """

def start_profile(ordinals: Sequence[int], max_records: int, all_warps: bool) -> str:
    """
    Begins to record on devices, after waiting for them. Returns what is wrong, or "".
    """

def stop_profile() -> tuple[str, list[tuple[int, bytes, int]]]:
    """
    Ends. Returns what is wrong, or "", and devices' ordinals, records and lost spans.
    """

def take_reports() -> list[tuple[int, int, str, int, str]]:
    """
    Takes the reports of failed calls: (rank, peer, phase, sequence_number, message).
    """

def post_report(rank: int, peer: int, phase: str, sequence_number: int, message: str = "") -> bool:
    """Adds a report; returns False if the mailbox is full."""

def release_workspaces() -> int:
    """Frees the device workspaces of this process and returns their bytes."""

def forget_meshes() -> None:
    """Forgets the processes of all meshes, whose communicators have ended."""

def shutdown() -> None:
    """
    Ends calls that wait for a peer that will not come, and waits for the devices.
    """
