#!/bin/sh
# Compiles jax_ep's CUDA and C++ sources with CUDA 12 (12.8 or newer) and says what was compiled.
#
# With a CUDA 12 toolkit (NVCC12=/path/to/nvcc, nvcc on PATH, or /usr/local/cuda-12*) this builds the
# whole module. Without one, the parts that pip has of CUDA 12.9 are installed under build/cuda12:
# NVRTC compiles the device code of every .cu, and the host compiler every .cc against the headers of
# 12.9. What remains unchecked then is the host code inside .cu files.
#
#   PYTHON=...   a Python >= 3.12 with jax, libucx, nanobind, cmake and ninja (default: .venv/bin/python)
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
case $PYTHON in /*) ;; */*) PYTHON=$PWD/$PYTHON ;; esac

is_cuda12() { [ -x "$1" ] && "$1" --version | grep -Eq 'release 12\.([89]|[1-9][0-9])'; }

for nvcc in "${NVCC12:-}" "$(command -v nvcc || true)" /usr/local/cuda-12*/bin/nvcc; do
  if is_cuda12 "$nvcc"; then
    echo "Building the module with $nvcc"
    export PATH="$(dirname "$PYTHON"):$PATH"
    cmake -S . -B build/cuda12/module -DPython_EXECUTABLE="$PYTHON" -DJAX_EP_CUDA=ON \
      -DCMAKE_CUDA_COMPILER="$nvcc"
    cmake --build build/cuda12/module --parallel 2
    echo "Compiled with a CUDA 12 toolkit: every .cu and .cc, linked into _ffi"
    exit
  fi
done

echo "There is no CUDA 12 toolkit here; using what pip has of CUDA 12.9"
site=build/cuda12/site
"$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $site \
  'nvidia-cuda-nvrtc-cu12==12.9.*' 'nvidia-cuda-runtime-cu12==12.9.*' 'nvidia-cuda-nvcc-cu12==12.9.*'

"$PYTHON" - $site $(find ffi/kernels -name "*.cu" -not -name puts.cu | sort) <<'PYTHON_END'
import ctypes
import glob
import sys

site, *sources = sys.argv[1:]
nvrtc = ctypes.CDLL(glob.glob(f"{site}/nvidia/cuda_nvrtc/lib/libnvrtc.so.12")[0])
major, minor = ctypes.c_int(), ctypes.c_int()
nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))


def compile_for(source: str, architecture: str) -> int:
    """Returns the bytes of the code; ends the script if there is an error or a warning."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    text = open(source, "rb").read()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, source.encode(), 0, None, None)
    options = [
        f"--gpu-architecture={architecture}",
        "--std=c++20",
        # As nvcc has it: what is constexpr needs no __device__ where it is used at compile time.
        "--device-as-default-execution-space",
        "--include-path=.",
        f"--include-path={site}/nvidia/cuda_runtime/include",
    ]
    encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = nvrtc.nvrtcCompileProgram(program, len(options), encoded)
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    if status or log.value:
        sys.exit(f"{source} for {architecture}: status {status}\n{log.value.decode()}")
    is_real = architecture.startswith("sm_")
    read = nvrtc.nvrtcGetCUBINSize if is_real else nvrtc.nvrtcGetPTXSize
    read(program, ctypes.byref(size))
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return size.value


for source in sources:
    for architecture in ("sm_80", "sm_90a", "compute_90"):
        size = compile_for(source, architecture)
        print(f"NVRTC {major.value}.{minor.value}: {source} for {architecture}, {size} bytes")
PYTHON_END

headers=$("$PYTHON" -c 'import jax.ffi; print(jax.ffi.include_dir())')
ucx=$("$PYTHON" -c 'import libucx, os; print(os.path.dirname(libucx.__file__))')/include
for source in $(find ffi/handlers ffi/kernels ffi/runtime -name "*.cc" | sort); do
  ${CXX:-c++} -std=c++20 -fsyntax-only -Wall -Wextra -Werror -I. -isystem "$headers" -isystem "$ucx" \
    -isystem $site/nvidia/cuda_runtime/include -isystem $site/nvidia/cuda_nvcc/include "$source"
  echo "${CXX:-c++} with the headers of CUDA 12.9: $source"
done
echo "Compiled with parts of CUDA 12.9: the device code of every .cu but that for NVSHMEM, and every .cc that uses CUDA"
echo "Not compiled: the host code of .cu files"
