"""Facts about a machine that need no CUDA: packages, NVML's answers, device files, limits.

Nothing here creates a CUDA context, waits, or needs a package: it has to work where all else fails.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.metadata
import os
import pathlib
import platform
import re
import resource
from collections.abc import Sequence
from typing import Any

import jax_ep
from jax_ep import _ffi
from jax_ep._src.core import network as networks
from jax_ep._src.core import runtime

PACKAGES = (
    *("jax-ep", "jax-ep-cuda13", "jax-ep-cuda12"),
    *("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "numpy"),
)
DEVICE_FILES = ("nvidiactl", "nvidia-uvm")  # besides one for each GPU
UCX_PACKAGES = ("libucx-cu13", "libucx-cu12")
NVSHMEM_PACKAGES = ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12")
ENVIRONMENT = (
    "JAX_EP_",
    "JAX_PLATFORMS",
    "NVIDIA_VISIBLE",
    "CUDA_VISIBLE",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "NCCL_",
    "NVSHMEM_",
    "UCX_",
    "XLA_",
)

# The defaults of containers, which are too small.
SMALL_SHM_BYTES = 64 * 2**20
SMALL_LOCKED_BYTES = 64 * 2**10

# nvml.h: nvmlGpuP2PStatus_t, nvmlGpuP2PCapsIndex_t
P2P_STATUS = (
    "yes",
    "the chipset does not support it",
    "the GPU does not support it",
    "the I/O hub between them does not support it",
    "disabled by the driver's settings",
    "not supported",
)
P2P_READ, P2P_NVLINK = 0, 2
MOST_LINKS = 18


def collect() -> dict[str, Any]:
    """The facts, as JSON values."""
    return {
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "location": os.path.dirname(jax_ep.__file__),
        "build": jax_ep.build_info(),
        "driver_problem": _ffi.driver_problem(),
        "environment": {
            name: value for name, value in os.environ.items() if name.startswith(ENVIRONMENT)
        },
        "container": container(),
        "network": network(),
        **nvml(),
    }


def version(package: str) -> str | None:
    """The version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def container(root: pathlib.Path = pathlib.Path("/")) -> dict[str, Any]:
    """Resources of which containers often have too little."""
    files = sorted(path.name for path in root.glob("dev/nvidia*"))
    try:
        shm = os.statvfs(root / "dev/shm")
        shm_bytes = shm.f_frsize * shm.f_blocks
    except OSError:
        shm_bytes = 0
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    opened, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "device_files": files,
        "missing_device_files": [name for name in DEVICE_FILES if name not in files],
        "shm_bytes": shm_bytes,
        "locked_memory_bytes": None if locked == resource.RLIM_INFINITY else locked,
        "open_files": None if opened == resource.RLIM_INFINITY else opened,
        "driver_module": (root / "proc/driver/nvidia/version").exists(),
    }


def network() -> dict[str, Any]:
    """Whether a network joins NVLink domains of several hosts, and the libraries it could be."""
    ucx, ucx_location = library(UCX_PACKAGES, networks.find_ucx(), "ucp")
    nvshmem, nvshmem_location = library(NVSHMEM_PACKAGES, networks.find_nvshmem(), "nvshmem_host")
    setting = os.environ.get(networks.VARIABLE) or "unset"
    facts = {
        "setting": setting,
        "joins_hosts": runtime.NETWORK_PROBLEM is None,
        "problem": runtime.NETWORK_PROBLEM,
        "ucx": ucx,
        "ucx_location": ucx_location,
        "nvshmem": nvshmem,
        "nvshmem_location": nvshmem_location,
    }
    if setting != "nvshmem" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        facts["refused"] = "CUDA_DEVICE_MAX_CONNECTIONS=1; UCX needs 2 or more, or that it is unset"
    return facts


def library(packages: Sequence[str], folder: str, name: str) -> tuple[str, str | None]:
    """A network's library and where it is: in a folder of packages, or the system's."""
    if folder:
        found = {package: number for package in packages if (number := version(package))}
        return ", ".join(map(" ".join, found.items())), folder
    system = ctypes.util.find_library(name)
    return system or "not found", "system" if system else None


def linked_libraries(maps: str) -> dict[str, str]:
    """CUDA's libraries in a text of /proc/self/maps, by name."""
    pattern = r"(/\S*/(lib(?:cuda|cudart|nccl|nvidia-ml|nvrtc|nvshmem_host)\.so[.\d]*))\s"
    return {name: path for path, name in re.findall(pattern, maps + "\n")}


# ---- NVML: the driver's own library, which needs no CUDA context


class NvmlError(Exception):
    """A call that NVML refused."""


class Nvml:
    """The few calls that the doctor makes."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.call("nvmlInit_v2")

    def call(self, name: str, *arguments: Any) -> None:
        """Raises if NVML does not answer with success."""
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise NvmlError(f"{name} answered {status}")

    def text(self, name: str, *arguments: Any) -> str:
        """A result that is a string."""
        buffer = ctypes.create_string_buffer(96)
        self.call(name, *arguments, buffer, ctypes.c_uint(len(buffer)))
        return buffer.value.decode()

    def number(self, name: str, *arguments: Any) -> int:
        """A result that is an integer, written to the last argument."""
        value = ctypes.c_int()
        self.call(name, *arguments, ctypes.byref(value))
        return value.value

    def gpus(self) -> list[dict[str, Any]]:
        """For every GPU its name and UUID, whether it is in MIG mode, and its active NVLinks."""
        return [self._gpu(handle) for handle in self._handles()]

    def peers(self) -> list[list[str]]:
        """For each pair of GPUs: "self", "NVLink", "yes" (by PCIe), or why there is no access."""
        handles = self._handles()
        return [["self" if a is b else self._access(a, b) for b in handles] for a in handles]

    def _handles(self) -> list[ctypes.c_void_p]:
        handles = []
        for index in range(self.number("nvmlDeviceGetCount_v2")):
            handle = ctypes.c_void_p()
            self.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
            handles.append(handle)
        return handles

    def _gpu(self, handle: ctypes.c_void_p) -> dict[str, Any]:
        links = 0
        for link in range(MOST_LINKS):
            try:
                links += self.number("nvmlDeviceGetNvLinkState", handle, ctypes.c_uint(link))
            except NvmlError:  # there are no more
                break
        try:
            pending = ctypes.c_int()
            current = ctypes.c_int()
            self.call("nvmlDeviceGetMigMode", handle, ctypes.byref(current), ctypes.byref(pending))
            in_mig_mode = current.value == 1
        except NvmlError:  # not a GPU that has it
            in_mig_mode = False
        return {
            "name": self.text("nvmlDeviceGetName", handle),
            "uuid": self.text("nvmlDeviceGetUUID", handle),
            "mig": in_mig_mode,
            "nvlinks": links,
        }

    def _access(self, a: ctypes.c_void_p, b: ctypes.c_void_p) -> str:
        def status(capability: int) -> int:
            try:
                return self.number("nvmlDeviceGetP2PStatus", a, b, ctypes.c_int(capability))
            except NvmlError:
                return len(P2P_STATUS) - 1

        if status(P2P_NVLINK) == 0:
            return "NVLink"
        read = status(P2P_READ)
        return P2P_STATUS[read] if read < len(P2P_STATUS) else P2P_STATUS[-1]


def nvml(library: Any = None) -> dict[str, Any]:
    """Driver, GPUs and peer matrix, as far as NVML tells."""
    found: dict[str, Any] = {"driver": None, "gpus": [], "peers": []}
    try:
        this = Nvml(library or ctypes.CDLL("libnvidia-ml.so.1"))
        found["driver"] = this.text("nvmlSystemGetDriverVersion")
        found["gpus"] = this.gpus()
        found["peers"] = this.peers()
    except (OSError, AttributeError, NvmlError) as error:
        found["nvml_problem"] = str(error)
    return found
