"""The network that joins NVLink domains, which JAX_EP_NETWORK chooses."""

from __future__ import annotations

import importlib.util
import os
import pathlib

NAMES = ("ucx", "nvshmem")


def find_ucx() -> str:
    """Returns the folder of the UCX of libucx-cu12 or -cu13; empty if neither is installed."""
    return _library_folder("libucx")


def find_nvshmem() -> str:
    """Returns the folder of nvidia-nvshmem-cu12's or -cu13's library; empty without either."""
    return _library_folder("nvidia.nvshmem")


def _library_folder(package: str) -> str:
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # not even the package around it is there
        return ""
    places = [] if spec is None else spec.submodule_search_locations or []
    return next((str(pathlib.Path(place, "lib")) for place in places), "")


def join_domains() -> str | None:
    """Starts to use the network of JAX_EP_NETWORK, if it is set, before the first call.

    Returns:
      Why domains of several hosts are not joined; None if they are.
    """
    name = os.environ.get("JAX_EP_NETWORK", "")
    if not name:
        return "JAX_EP_NETWORK is not set"
    if name == "none":
        return "JAX_EP_NETWORK is 'none'"
    if name not in NAMES:
        expected = ", ".join(map(repr, NAMES))
        return f"JAX_EP_NETWORK is {name!r}; expected {expected}, 'none', or that it is not set"
    from jax_ep import _ffi

    if name == "ucx":
        # UCX's cache misses GPU memory that it has not seen allocated, and takes it for the host's.
        os.environ.setdefault("UCX_MEMTYPE_CACHE", "n")
        problem = _ffi.use_ucx(find_ucx())
    else:
        problem = _ffi.use_nvshmem(find_nvshmem())
    return f"JAX_EP_NETWORK is {name!r}, and {problem}" if problem else None


def is_chosen() -> bool:
    """Whether JAX_EP_NETWORK names a network, which then joins the domains of one host, too."""
    return os.environ.get("JAX_EP_NETWORK", "") not in ("", "none")
