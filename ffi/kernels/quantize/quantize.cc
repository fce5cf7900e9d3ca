#include "ffi/kernels/quantize/quantize.h"

#include <algorithm>

#include "ffi/kernels/checks.h"
#include "ffi/runtime/calls/config.h"
#include "ffi/runtime/cuda/device_cuda.h"

namespace jax_ep {
namespace {

static_assert(kValuesPerScale == kScaleBlock, "host and device agree");

// Returns whether a thread can load a vector of the row and store its values at once.
bool HasWholeVectors(const Quantize& call) {
  const int64_t per_vector = kVectorBytes / ElementBytes(call.type);
  return call.columns % per_vector == 0 && IsAligned(call.x, kVectorBytes) &&
         IsAligned(call.values, per_vector);
}

}  // namespace

Status LoadQuantizeKernels() {
  for (ElementType type : {kBF16, kF16, kF32}) {
    for (QuantizeKind kind :
         {QuantizeKind::kBlock128, QuantizeKind::kRow, QuantizeKind::kRowE5M2}) {
      cudaFuncAttributes attributes;  // reading them loads the code
      Status status =
          FromCuda(cudaFuncGetAttributes(&attributes, QuantizeKernelAddress(type, kind)),
                   "loading quantize");
      if (!status.ok()) return status;
    }
  }
  return {};
}

Status CheckQuantizeLaunch(int64_t num_rows, int64_t columns) {
  return CheckCounts({{"M", num_rows}, {"K", columns}});
}

Status LaunchQuantize(const Quantize& call, cudaStream_t stream) {
  Status status = CheckQuantizeLaunch(call.num_rows, call.columns);
  if (!status.ok() || call.num_rows == 0 || call.columns == 0) return status;
  const bool is_e5m2 = call.kind == QuantizeKind::kRowE5M2;
  QuantizeParams params = {
      .x = call.x,
      .values = call.values,
      .scales = call.scales,
      .columns = static_cast<int32_t>(call.columns),
      .scale = {.min_amax = call.min_amax,
                .inverse_largest = is_e5m2 ? kInverseLargestE5M2 : kInverseLargestE4M3,
                .power_of_two_scales = call.power_of_two_scales},
      .is_aligned = HasWholeVectors(call)};
  const int64_t vectors = CeilDivide(call.columns * ElementBytes(call.type), kVectorBytes);
  const int64_t warps = CeilDivide(vectors, int64_t{32 * kQuantizeVectors});
  const int64_t threads = std::min<int64_t>(32 * warps, kMaxQuantizeThreads);
  void* arguments[] = {&params};
  return FromCuda(cudaLaunchKernel(QuantizeKernelAddress(call.type, call.kind),
                                   dim3(static_cast<unsigned>(call.num_rows)),
                                   dim3(static_cast<unsigned>(threads)), arguments, 0, stream),
                  "quantize");
}

}  // namespace jax_ep
