"""The tier that the tests run on: 8 CPU devices, or 1, 2, 4 GPUs. It alone decides what is collected and how.

JAX_EP_TEST_TIER is "cpu" (the default) or "gpu<number>". On a GPU tier every operation must run its kernels, and no test
is skipped: what makes no sense there is not collected. Import this before jax, which reads the environment that it sets.
"""

from __future__ import annotations

import importlib.metadata
import os
import pathlib

NAME = os.environ.get("JAX_EP_TEST_TIER", "cpu")
ON_GPU = NAME != "cpu"
NUM_GPUS = int(NAME.removeprefix("gpu")) if ON_GPU else 0
FOLDER = pathlib.Path(__file__).resolve().parents[1]

# Suites of the CPU tier that run on GPUs as well. The others test what does not depend on a device: the build, lowering,
# messages, numpy's oracle, routers. Those in tests/gpu_only/ run on GPUs only.
ON_BOTH = (
    "combine", "dispatch", "doctor", "export", "gradients", "grouped_matmul", "grouped_matmul_activation", "grouped_mlp",
    "meshes", "moe_mlp", "nnx", "plan", "property", "reference", "transformations",
)  # fmt: skip

SETTINGS = {
    "JAX_EP_IMPLEMENTATION": "cuda",
    "JAX_PLATFORMS": "cuda,cpu",
    # dense results that layers are compared with: float32 products, not TF32
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    # several processes may share the GPUs
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    # NVLink multicast is not for test machines that others use
    "NCCL_NVLS_ENABLE": "0",
    # small programs compile in half the time, and choose alike in every process
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",
    # a hang is an error, soon; longer than it takes to compile on one GPU what others wait for
    "JAX_EP_ENTRY_TIMEOUT_S": "100",
    "JAX_EP_PROGRESS_TIMEOUT_S": "30",
}


def suites() -> list[pathlib.Path]:
    """The files of this tier."""
    on_gpu_only = sorted(FOLDER.glob("gpu_only/*_test.py"))
    on_cpu = sorted(set(FOLDER.glob("*/*_test.py")) - set(on_gpu_only))
    if ON_GPU:
        names = {f"{name}_test.py" for name in ON_BOTH}
        return [path for path in on_cpu if path.name in names] + on_gpu_only
    return on_cpu


def _prepare() -> None:
    """Sets the environment of this tier."""
    if not ON_GPU:
        return
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    os.environ.pop("JAX_EP_TEST_DEVICES", None)
    if is_rehearsal():
        os.environ["JAX_NUM_CPU_DEVICES"] = str(NUM_GPUS)
        return
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = given.split(",") if given else [str(index) for index in range(NUM_GPUS)]
    if len(devices) < NUM_GPUS:
        raise RuntimeError(
            f"tier {NAME}: CUDA_VISIBLE_DEVICES={given} has too few devices; expected {NUM_GPUS} or more"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices[:NUM_GPUS])


def is_rehearsal() -> bool:
    """A GPU tier under JAX_PLATFORMS=cpu JAX_EP_IMPLEMENTATION=xla: to see that tests are well written, not on record."""
    return ON_GPU and os.environ["JAX_PLATFORMS"] == "cpu"


def check_installation() -> None:
    """On a GPU tier the installed package is tested, with its kernels, never a checkout beside it."""
    if not ON_GPU or is_rehearsal():
        return
    import jax

    import jax_ep

    installed = str(importlib.metadata.distribution("jax_ep").locate_file("jax_ep/__init__.py"))
    if not os.path.exists(installed) or not os.path.samefile(installed, jax_ep.__file__):
        raise RuntimeError(
            f"tier {NAME}: jax_ep was imported from {jax_ep.__file__}; expected the installed {installed}"
        )
    if not jax_ep.build_info()["cuda"]:
        raise RuntimeError(f"tier {NAME}: {jax_ep.__file__} was built without CUDA")
    if jax.device_count() != NUM_GPUS or jax.default_backend() != "gpu":
        raise RuntimeError(f"tier {NAME}: JAX has {jax.devices()}; expected {NUM_GPUS} GPUs")


def only_on_cpu(test):
    """Decorates a test, or a class of them, that needs a CPU or 8 devices: GPU tiers do not collect it."""
    test.only_on_cpu = True
    return test


def needs_gpus(count: int):
    """Decorates a test, or a class of them, for GPU tiers of so many devices or more: others do not collect it."""

    def decorate(test):
        test.needs_gpus = count
        return test

    return decorate


def is_collected(*parts) -> bool:
    """Whether a test function and its class (either may be None) belong to this tier."""
    return not any(
        (ON_GPU and getattr(part, "only_on_cpu", False))
        or getattr(part, "needs_gpus", 0) > NUM_GPUS
        for part in parts
    )


_prepare()
