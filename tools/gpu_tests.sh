#!/bin/bash
# Runs the GPU tier of the test suite on the installed package, and puts the result on record.
#
#   tools/gpu_tests.sh 4                     on 4 GPUs (the first of CUDA_VISIBLE_DEVICES, if that is set)
#   tools/gpu_tests.sh 2 tests/operations/plan_test.py    some files, or any arguments of pytest; no record
#
#   PYTHON=...   the interpreter that has jax_ep, jax, pytest, pytest-xdist, absl-py, hypothesis, flax (python3)
#   JOBS=...     processes that share the GPUs (default 4)
#   PARTS=...    parts to run (default "shared general alone"); the reports of the others are kept:
#                "shared" in JOBS processes; "general" without the low-latency kernels; "alone" has the
#                suites that measure, break a GPU, or take long
#   LIMIT=...    seconds after which a part is killed (default 1200)
#   RESULTS=...  where pytest's reports and the log go (default build/gpu_tests)
#   MACHINE_CODE=...  the kernels' digest, from the machine that built the wheel, where this one lacks
#                pyelftools or cuobjdump (default dist/machine_code.json; tools/gpu_record.py explains it)
set -uo pipefail
cd "$(dirname "$0")/.."

gpus=${1:?how many GPUs: tools/gpu_tests.sh 1, 2 or 4}
shift
python=${PYTHON:-python3}
jobs=${JOBS:-4}
parts=${PARTS:-shared general alone}
limit=${LIMIT:-1200}
results=${RESULTS:-build/gpu_tests}
export JAX_EP_TEST_TIER=gpu$gpus PYTHONUNBUFFERED=1
mkdir -p "$results"

alone=(fault device_memory overlap rounds)
alone=("${alone[@]/#/tests/gpu_only/}")
alone=("${alone[@]/%/_test.py}")

# run NAME ARGUMENTS...: runs pytest. -P: jax_ep is the installed one, never the checkout's. A hang prints its stack.
run() {
  local name=$1
  shift
  timeout -k 10 "$limit" "$python" -P -m pytest -p no:cacheprovider -o faulthandler_timeout=150 \
    --durations=10 --junitxml="$results/gpu$gpus-$name.xml" "$@" 2>&1 | tee "$results/gpu$gpus-$name.log"
}

status=0
if [ $# -gt 0 ]; then
  run chosen "$@"
  exit
fi
# The digest that the record will need: without it, the tests would run in vain.
"$python" -P tools/gpu_record.py show || exit
general=(tests/operations/{dispatch,combine,plan}_test.py tests/transformations/gradients_test.py tests/gpu_only/graph_test.py)
shared=("${alone[@]/#/--ignore=}")
[ "$jobs" -le 1 ] || { shared+=(-n "$jobs" --dist loadfile); general+=(-n "$jobs"); }
for part in $parts; do
  rm -f "$results/gpu$gpus-$part.xml"
  case $part in
    shared) run shared "${shared[@]}" ;;
    alone) run alone "${alone[@]}" ;;
    general) JAX_EP_TEST_GENERAL=1 run general "${general[@]}" ;;
    *) echo "PARTS=$parts: expected some of shared, general, alone" >&2 && false ;;
  esac || status=1
done
"$python" -P tools/gpu_record.py add "gpu$gpus" "$results/gpu$gpus"-{shared,general,alone}.xml || status=1
exit $status
