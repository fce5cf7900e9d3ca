"""Builds the wheel of this checkout into dist/, in the environment of the interpreter that runs it.

The build requirements are installed into that environment and stay there, so that the next build
only compiles what changed; a build isolated by pip would compile everything again.

Where JAX_EP_CUDA=ON asks for CUDA and there is no nvcc, the compiler that NVIDIA publishes for pip
is installed as one more build requirement. PIP_CONSTRAINT can choose its version. So is NVSHMEM
where kernels are compiled.
"""

import pathlib
import subprocess
import sys
import sysconfig

ROOT = pathlib.Path(__file__).resolve().parent.parent
NVCC = [
    f"nvidia-{part}>=13.0,<14"
    for part in ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-runtime", "cuda-cccl")
]

# The oldest that serves at run time: kernels work with a newer library, but not with an older one.
NVSHMEM = "3.4.5"


def install(requirements: set[str] | list[str]) -> None:
    """Installs packages into the running interpreter's environment."""
    if not requirements:  # the programs of a build may be on the PATH already
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, *sorted(requirements)], check=True)


def ensure_nvcc() -> None:
    """Installs a CUDA compiler if one is asked for and none is here."""
    sys.path.insert(0, str(ROOT / "build_tools"))
    import find_nvcc

    if find_nvcc.read_mode() == "ON" and find_nvcc.find_nvcc("AUTO").nvcc is None:
        install(NVCC)
        # Older releases look for libraries in lib64, and pip's packages have them in lib.
        library = pathlib.Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "lib64"
        if not library.exists():
            library.symlink_to("lib")


def ensure_nvshmem() -> None:
    """Installs what the kernels for NVSHMEM are compiled and linked with, if CUDA is compiled."""
    import find_nvcc

    nvcc = find_nvcc.find_nvcc().nvcc
    if nvcc is not None:
        install([f"nvidia-nvshmem-cu{nvcc.version[0]}=={NVSHMEM}"])


def main() -> None:
    """Builds the wheel and prints its path."""
    install(["build"])
    import build

    ensure_nvcc()
    ensure_nvshmem()
    builder = build.ProjectBuilder(ROOT)
    install(builder.build_system_requires)
    install(builder.get_requires_for_build("wheel"))
    print(builder.build("wheel", ROOT / "dist"))


if __name__ == "__main__":
    main()
