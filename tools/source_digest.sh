#!/bin/sh
# Prints one number for the sources that the GPU tests run, which the benchmarks are not.
# tests/gpu_record.json keeps the number of the sources that its tests ran on, so a record that is
# out of date shows.
set -eu
cd "$(dirname "$0")/.."
export LC_ALL=C
find CMakeLists.txt cmake ffi jax_ep -type f ! -path 'jax_ep/bench/*' ! -name '*.pyc' ! -name '*.so' |
  sort | xargs sha256sum | sha256sum | cut -c -16
