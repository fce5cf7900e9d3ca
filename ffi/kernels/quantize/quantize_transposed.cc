#include "ffi/kernels/quantize/quantize_transposed.h"

#include "ffi/device/quantize/transposed_params.h"
#include "ffi/kernels/checks.h"
#include "ffi/kernels/quantize/transposed_kernels.h"
#include "ffi/runtime/calls/config.h"
#include "ffi/runtime/cuda/device_cuda.h"

namespace jax_ep {

static_assert(kValuesPerScale == kScaleBlock, "host and device agree");

Status LoadQuantizeTransposedKernels() {
  for (ElementType type : {kBF16, kF16, kF32, kF8E4M3}) {
    for (int form = 0; form < (type == kF8E4M3 ? 4 : 8); ++form) {
      const void* const kernel =
          QuantizeTransposedKernelAddress(type, form & 1, form & 2, form & 4);
      cudaFuncAttributes attributes;  // reading them loads the code
      Status status =
          FromCuda(cudaFuncGetAttributes(&attributes, kernel), "loading quantize_transposed");
      if (!status.ok()) return status;
    }
  }
  return {};
}

Status CheckQuantizeTransposedLaunch(int64_t num_rows, int64_t columns, int64_t row_blocks) {
  Status status = CheckCounts({{"M", num_rows}, {"C", columns}, {"B", row_blocks}});
  if (!status.ok()) return status;
  const double blocks = static_cast<double>(row_blocks) * CeilDivide(columns, kScaleBlock);
  return CheckScaleBlocks(blocks);
}

Status LaunchQuantizeTransposed(const QuantizeTransposed& call, cudaStream_t stream) {
  Status status = CheckQuantizeTransposedLaunch(call.num_rows, call.columns, call.row_blocks);
  const int64_t column_blocks = CeilDivide(call.columns, kScaleBlock);
  const auto blocks = static_cast<unsigned>(call.row_blocks * column_blocks);
  if (!status.ok() || blocks == 0) return status;
  if (!IsAligned(call.values, kVectorBytes)) {
    constexpr const char* kName = "values";
    return FailedPrecondition(kName, " begins at an address that is no multiple of ", kVectorBytes,
                              "; TMA needs that. Copy the array first");
  }
  const bool with_rows = call.row_values != nullptr;
  const int64_t loaded = call.type == kF8E4M3 ? kVectorBytes / 2 : kVectorBytes;
  const bool is_aligned = call.columns * ElementBytes(call.type) % loaded == 0 &&
                          IsAligned(call.x, loaded) &&
                          IsAligned(call.row_values, kVectorBytes / ElementBytes(call.type));
  QuantizeTransposedParams params = {
      .x = call.x,
      .x_scales = call.x_scales,
      .x_scales_per_row = static_cast<int32_t>(call.x_scales_per_row),
      .first_rows = call.first_rows,
      .num_rows = call.block_rows,
      .values = call.values,
      .scales = call.scales,
      .rows = static_cast<int32_t>(call.num_rows),
      .columns = static_cast<int32_t>(call.columns),
      .column_blocks = static_cast<int32_t>(column_blocks),
      .scale = {.min_amax = call.min_amax,
                .inverse_largest = kInverseLargestE4M3,
                .power_of_two_scales = call.power_of_two_scales},
      .zero_tail = call.zero_tail,
      .row_values = call.row_values,
      .row_scales = call.row_scales};
  const void* const kernel =
      QuantizeTransposedKernelAddress(call.type, call.per_column, is_aligned, with_rows);
  const auto threads = static_cast<unsigned>(QuantizeTransposedThreads(call.type));
  void* arguments[] = {&params};
  return FromCuda(cudaLaunchKernel(kernel, dim3(blocks), dim3(threads), arguments, 0, stream),
                  "quantize_transposed");
}

}  // namespace jax_ep
