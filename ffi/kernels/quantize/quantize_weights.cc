#include "ffi/kernels/quantize/quantize_weights.h"

#include "ffi/kernels/checks.h"
#include "ffi/kernels/quantize/weights_kernels.h"
#include "ffi/runtime/calls/config.h"
#include "ffi/runtime/cuda/device_cuda.h"

namespace jax_ep {
namespace {

static_assert(kValuesPerScale == kScaleBlock, "host and device agree");

// Returns matrices [rows, columns], to be written from a row and a column on.
QuantizedMatrices Matrices(const LayoutArrays& arrays, int64_t rows, int64_t columns,
                           int64_t first_row, int64_t first_column) {
  if (arrays.values == nullptr) return {};
  const int64_t row_blocks = CeilDivide(rows, kScaleBlock);
  const int64_t column_blocks = CeilDivide(columns, kScaleBlock);
  return {.values = arrays.values + first_row * columns + first_column,
          .scales =
              arrays.scales + first_row / kScaleBlock * column_blocks + first_column / kScaleBlock,
          .value_stride = columns,
          .scale_stride = column_blocks,
          .matrix_value_stride = rows * columns,
          .matrix_scale_stride = row_blocks * column_blocks};
}

// Returns whether every vector that a thread loads or stores is whole and aligned.
bool HasWholeVectors(const QuantizeWeights& call, const WeightLayouts& layouts) {
  const int64_t loaded = kVectorBytes / ElementBytes(call.type);  // values
  bool is_aligned = call.columns % loaded == 0 && IsAligned(call.x, kVectorBytes);
  if (const uint8_t* values = layouts.as_given.values) {
    is_aligned &= layouts.total_columns % loaded == 0 && IsAligned(values, loaded);
  }
  if (const uint8_t* values = layouts.transposed.values) {
    is_aligned &= call.rows % kVectorBytes == 0 && IsAligned(values, kVectorBytes);
  }
  return is_aligned;
}

}  // namespace

Status LoadQuantizeWeightsKernels() {
  for (ElementType type : {kBF16, kF16, kF32}) {
    for (bool is_aligned : {false, true}) {
      const void* const kernel = QuantizeWeightsKernelAddress(type, is_aligned);
      cudaFuncAttributes attributes;  // reading them loads the code
      Status status =
          FromCuda(cudaFuncGetAttributes(&attributes, kernel), "loading quantize_weights");
      if (!status.ok()) return status;
    }
  }
  return {};
}

Status CheckQuantizeWeightsLaunch(int64_t num_matrices, int64_t rows, int64_t columns) {
  Status status = CheckCounts({{"L", num_matrices}, {"R", rows}, {"C", columns}});
  if (!status.ok()) return status;
  const double blocks = static_cast<double>(num_matrices) * CeilDivide(rows, kScaleBlock) *
                        CeilDivide(columns, kScaleBlock);
  return CheckScaleBlocks(blocks);
}

Status LaunchQuantizeWeights(const QuantizeWeights& call, const WeightLayouts& layouts,
                             cudaStream_t stream) {
  Status status = CheckQuantizeWeightsLaunch(call.num_matrices, call.rows, call.columns);
  const int64_t row_blocks = CeilDivide(call.rows, kScaleBlock);
  const int64_t column_blocks = CeilDivide(call.columns, kScaleBlock);
  const auto blocks = static_cast<unsigned>(call.num_matrices * row_blocks * column_blocks);
  if (!status.ok() || blocks == 0) return status;
  QuantizeWeightsParams params = {
      .x = call.x,
      .as_given =
          Matrices(layouts.as_given, call.rows, layouts.total_columns, 0, layouts.first_column),
      .transposed =
          Matrices(layouts.transposed, layouts.total_columns, call.rows, layouts.first_column, 0),
      .rows = static_cast<int32_t>(call.rows),
      .columns = static_cast<int32_t>(call.columns),
      .row_blocks = static_cast<int32_t>(row_blocks),
      .column_blocks = static_cast<int32_t>(column_blocks),
      .scale = {.min_amax = call.min_amax,
                .inverse_largest = kInverseLargestE4M3,
                .power_of_two_scales = call.power_of_two_scales}};
  const void* const kernel =
      QuantizeWeightsKernelAddress(call.type, HasWholeVectors(call, layouts));
  const auto threads = static_cast<unsigned>(QuantizeWeightsThreads(call.type));
  void* arguments[] = {&params};
  return FromCuda(cudaLaunchKernel(kernel, dim3(blocks), dim3(threads), arguments, 0, stream),
                  "quantize_weights");
}

}  // namespace jax_ep
