"""The network that joins NVLink domains, which JAX_EP_NETWORK chooses."""

from __future__ import annotations

import importlib.util
import os
import pathlib

VARIABLE = "JAX_EP_NETWORK"
NAMES = ("ucx", "nvshmem")
AUTO = "auto"  # the first of these that can be used


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
    name = os.environ.get(VARIABLE, "")
    if not name:
        return f"{VARIABLE} is not set"
    if name == "none":
        return f"{VARIABLE} is 'none'"
    if name not in (*NAMES, AUTO):
        expected = ", ".join(map(repr, (*NAMES, AUTO)))
        return f"{VARIABLE} is {name!r}; expected {expected}, 'none', or that it is not set"
    problems = []
    for network in NAMES if name == AUTO else (name,):
        problem = _use(network)
        if not problem:
            return None
        problems.append(problem)
    return f"{VARIABLE} is {name!r}, and {'; '.join(problems)}"


def _use(name: str) -> str:
    """Uses a network from now on. Returns why it cannot; empty if it can."""
    from jax_ep import _ffi

    if name == "ucx":
        # UCX's cache misses GPU memory that it has not seen allocated, and takes it for the host's.
        os.environ.setdefault("UCX_MEMTYPE_CACHE", "n")
        return _ffi.use_ucx(find_ucx())
    return _ffi.use_nvshmem(find_nvshmem())


def is_chosen() -> bool:
    """Whether JAX_EP_NETWORK names a network, which then joins the domains of one host, too."""
    return os.environ.get(VARIABLE, "") not in ("", "none", AUTO)
