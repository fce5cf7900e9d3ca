#!/bin/bash
# Tests rank groups that span processes on one GPU: 2 and 4 processes share it, each as if it were a host of its own for NCCL.
# tests/processes/programs_test.py has the list of programs.
# The kernels of the processes take turns, so nothing here tells how fast they are.
#
#   tools/shared_gpu_test.sh          2 and 4 processes, some minutes
#   tools/shared_gpu_test.sh 2        2 processes
#
#   PYTHON=...   the interpreter that has the jax_ep to be tested, jax and absl-py (python3)
#   LIMIT=...    seconds after which everything is killed (default 480)
set -uo pipefail
cd "$(dirname "$0")/.."

[ $# -gt 0 ] || set -- 2 4
export PYTHONPATH="$PWD/tests/helpers${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
# -P: jax_ep is the installed one, never the checkout's. The parent needs no GPU.
JAX_PLATFORMS=cpu exec timeout -k 10 "${LIMIT:-480}" \
  "${PYTHON:-python3}" -P tests/processes/programs_test.py --shared-gpu "$@"
