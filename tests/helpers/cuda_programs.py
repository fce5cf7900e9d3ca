"""Shared by the suites that run on GPUs only: programs in processes of their own, and the devices' memory."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import re
import subprocess
import sys

MIB = 2**20


# ---- processes: XLA's flags, deadlines and crashes belong to one


def run(file: str, *arguments: str, flags: str = "", timeout: float = 300, **environment: str):
    """Runs a test file by itself, with more XLA_FLAGS and variables. The test fails with its output if it fails or hangs."""
    changed = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}"} | environment
    process = subprocess.Popen(
        [sys.executable, file, *arguments],
        env=os.environ | changed,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()  # it may hold on to SIGTERM
        output, errors = process.communicate()
        raise AssertionError(
            f"no end after {timeout} s: {changed}\n{output}\n{errors[-8000:]}"
        ) from None
    assert process.returncode == 0, (
        f"status {process.returncode}: {changed}\n{output}\n{errors[-8000:]}"
    )
    return subprocess.CompletedProcess(process.args, 0, output, errors)


# ---- compiled programs


def targets(compiled) -> collections.Counter[str]:
    """How often a compiled program calls each operation, by its name without "jax_ep." and ".v1"."""
    return collections.Counter(
        re.findall(r'custom_call_target="jax_ep\.(\w+)\.v1"', compiled.as_text())
    )


# ---- device memory, as the driver sees it: all of it, not only JAX's pool


class Driver:
    """libcuda, in the contexts that JAX uses."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._call("cuInit", 0)

    def free_bytes(self, device: int) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        with self._on(device):
            self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    @contextlib.contextmanager
    def filled(self, device: int, but: int):
        """While it lasts, only `but` bytes of the device are free."""
        address = ctypes.c_uint64()
        with self._on(device):
            size = ctypes.c_size_t(self.free_bytes(device) - but)
            self._call("cuMemAlloc_v2", ctypes.byref(address), size)
        try:
            yield
        finally:
            with self._on(device):
                self._call("cuMemFree_v2", address)

    @contextlib.contextmanager
    def _on(self, device: int):
        if device not in self._contexts:
            self._contexts[device] = ctypes.c_void_p()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._contexts[device]), device)
        self._call("cuCtxPushCurrent_v2", self._contexts[device])
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments) -> None:
        status = getattr(self._cuda, name)(*arguments)
        assert status == 0, f"{name}: error {status} of the CUDA driver"
