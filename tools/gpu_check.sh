#!/bin/bash
# Runs everything that a change of kernels needs on a machine with GPUs: timings, checks, sanitizers, tiers.
#
#   cmake -S . -B build/gpu -G Ninja -DJAX_EP_CUDA=ON -DJAX_EP_BUILD_GPU_TESTS=ON && cmake --build build/gpu
#   tools/gpu_check.sh 4                   on 4 GPUs (or 2, or 1): a quarter of an hour on 4 H100
#   tools/gpu_check.sh 4 domains tiers     some parts, of
#
#     transfers   times one level
#     domains     tests and times transfers over NVLink domains: 130 s on 4 H100
#     networks    two processes, whose domains NVSHMEM joins, then UCX (pip install nvidia-nvshmem-cu13 libucx-cu13)
#     tiers       the Python tests, and beside them C++ programs and sanitizers: 450 s on 4 H100
#     models      layers beside transformers', and tokens per second of OLMoE's shapes with random weights
#     overlap     how much of the transfers the experts can hide, forward and both passes (pip install nvidia-ml-py);
#                 only if it is named
#
#   PROGRAMS=...          where the programs of tests/cpp/gpu are (default build/gpu/tests/cpp/gpu)
#   RESULTS=...           where logs go (default build/gpu_check)
#   PYTHON=... JOBS=...   as for tools/gpu_tests.sh
set -uo pipefail
cd "$(dirname "$0")/.."

gpus=${1:?how many GPUs: tools/gpu_check.sh 1, 2 or 4}
shift
python=${PYTHON:-python3}
programs=${PROGRAMS:-build/gpu/tests/cpp/gpu}
results=${RESULTS:-build/gpu_check}
mkdir -p "$results"
rm -f "$results/failed"

# run NAME SECONDS COMMAND...: writes the command's output to a log; shows its exit status and last line.
run() {
  local name=$1 limit=$2 status=0
  shift 2
  timeout -k 10 "$limit" "$@" >"$results/$name.log" 2>&1 || status=$?
  [ $status -eq 0 ] || touch "$results/failed"
  printf '%4d s  %-24s %s  %s\n' $SECONDS "$name" $status "$(tail -n 1 "$results/$name.log" | cut -c 1-90)"
}

# Also shows the timings that the command prints.
timed() {
  run "$@"
  grep -E '^(TIME|FAIL)' "$results/$1.log"
}

# sanitized NAME SECONDS TOOL COMMAND...: runs the command under a tool of compute-sanitizer.
sanitized() { run "$1" "$2" compute-sanitizer --tool "$3" --error-exitcode 9 "${@:4}"; }

tier() { RESULTS="$results/gpu$1" run "tier_gpu$1" 600 tools/gpu_tests.sh "$1"; }

on() { CUDA_VISIBLE_DEVICES=$1 "${@:2}"; }

# Uses one GPU: racecheck and synccheck do not see other devices.
checks() {
  run fused 120 "$programs/grouped_matmul_activation_test" check 22
  run matmul 120 "$programs/grouped_matmul_test" check 8
  run quantize 60 "$programs/quantize_test" check
  run quantize_weights 60 "$programs/quantize_weights_test" check
  run quantize_transposed 60 "$programs/quantize_transposed_test" check
  run activation_gradient 60 "$programs/quantize_activation_gradient_test" check
  run fp8_gradient 120 "$programs/grouped_matmul_fp8_rhs_gradient_test" check
  run mxfp4 120 "$programs/grouped_matmul_mxfp4_test" check
  run mxfp4_activation 120 "$programs/grouped_matmul_mxfp4_activation_test" check
  run mxfp4_gradient 120 "$programs/grouped_matmul_mxfp4_lhs_gradient_test" check
  run quantized_rows 100 "$programs/transfer_test" --ranks 4 --shared --only quantized --seconds 10
  local tool
  for tool in memcheck racecheck synccheck; do
    sanitized "transfer_$tool" 200 $tool "$programs/transfer_test" --ranks 1 --tiny
    sanitized "fused_$tool" 200 $tool "$programs/grouped_matmul_activation_test" small
    sanitized "matmul_$tool" 200 $tool "$programs/grouped_matmul_test" small
    sanitized "quantize_$tool" 60 $tool "$programs/quantize_test" small
    sanitized "quantize_weights_$tool" 60 $tool "$programs/quantize_weights_test" small
    sanitized "quantize_transposed_$tool" 60 $tool "$programs/quantize_transposed_test" small
    sanitized "activation_gradient_$tool" 60 $tool "$programs/quantize_activation_gradient_test" small
    sanitized "fp8_gradient_$tool" 100 $tool "$programs/grouped_matmul_fp8_rhs_gradient_test" small
    sanitized "mxfp4_$tool" 100 $tool "$programs/grouped_matmul_mxfp4_test" small
    sanitized "mxfp4_activation_$tool" 100 $tool "$programs/grouped_matmul_mxfp4_activation_test" small
    sanitized "mxfp4_gradient_$tool" 100 $tool "$programs/grouped_matmul_mxfp4_lhs_gradient_test" small
  done
}

# domains RANKS SIZE [--shared]: tests transfers over domains of SIZE ranks, with loads and stores between them and
# with a slow network; without --shared also times them, few tokens and many, beside one level.
domains() {
  local given=(--ranks "$1" --domain-size "$2" "${@:3}") name tokens shapes=()
  for name in random quantized graph faults; do
    run "domains_$2_$name" 100 "$programs/transfer_test" "${given[@]}" --only $name --seconds 10
    run "network_$2_$name" 100 "$programs/transfer_test" "${given[@]}" --network --only $name --seconds 10
  done
  [ $# -eq 2 ] || return 0
  for tokens in 1 16 64 128 4096; do shapes+=(--shape "$tokens,7168,256,8,0"); done
  timed "domains_$2_timing" 100 "$programs/transfer_test" "${given[@]}" --only timing "${shapes[@]}"
}

# Each GPU is a domain. Prints the network's times beside those of loads and stores.
networks() {
  [ "$gpus" -ge 2 ] || return 0
  local network
  for network in nvshmem ucx; do
    PYTHONPATH=tests/helpers:tests/processes on 0,1 timed $network 400 "$python" -P tests/processes/network_layouts.py --network $network
  done
  PYTHONPATH=tests/helpers:tests/processes on 0,1 timed paced 200 "$python" -P tests/processes/network_layouts.py --network ucx \
    --pace 50,5 --only times
  local ucx
  ucx=$("$python" -P -c 'import libucx, os; print(os.path.dirname(libucx.__file__) + "/lib")')
  UCX_TLS=cuda_ipc,cuda_copy,sm,self on 0,1 timed latency 60 "$programs/network_latency" "$ucx"
}

models() {
  local folder prompts=() i
  folder=$(mktemp -d)
  for i in {1..16}; do prompts+=(--prompt "$i 2 3 4 5 6 7 8"); done
  on 0 run torch_parity 150 "$python" -P tools/torch_parity.py olmoe qwen3_moe
  run write_olmoe 100 "$python" -P tools/checkpoint_memory.py write "$folder"
  PYTHONPATH=examples on 0 run generate 150 "$python" -P examples/generate.py "$folder" "${prompts[@]}" \
    --batch-size 16 --max-new-tokens 128
  rm -rf "$folder"
}

overlap() {
  local recipe passes all
  all=$(seq -s , 0 $((gpus - 1)))
  for recipe in bfloat16 fp8; do
    for passes in forward both; do
      on "$all" run "overlap_${recipe}_$passes" 600 "$python" -P tools/overlap_ceiling.py --recipe $recipe \
        --passes $passes --out "$results/overlap_${recipe}_$passes.json"
      grep '│' "$results/overlap_${recipe}_$passes.log"
    done
  done
}

# Each of 4 GPUs has work.
tiers() {
  if [ "$gpus" -lt 4 ]; then
    [ "$gpus" -lt 2 ] || tier 2
    on 0 tier 1
    on 0 checks
    return
  fi
  tier 4
  (on 0 tier 1) &
  (on 1,2 tier 2) &
  (on 3 checks) &
  wait
  on 0,1 sanitized transfer_memcheck_2 100 memcheck "$programs/transfer_test" --ranks 2 --tiny
}

# Timings come first, alone.
for part in ${*:-transfers domains networks tiers models}; do
  case $part in
    transfers)
      timed transfers 300 "$programs/transfer_test" --ranks "$gpus"
      [ "$gpus" -lt 4 ] || on 0,1 timed transfers_2 60 "$programs/transfer_test" --only timing
      ;;
    domains)
      case $gpus in
        1) domains 4 2 --shared ;;
        2) domains 2 1 ;;
        *)
          domains 4 2
          domains 4 1
          ;;
      esac
      ;;
    networks | tiers | models | overlap) $part ;;
    *)
      echo "tools/gpu_check.sh: $part is no part; expected transfers, domains, networks, tiers, models or overlap" >&2
      exit 2
      ;;
  esac
done
[ ! -e "$results/failed" ]
