#include "ffi/kernels/quantize/quantize_activation_gradient.h"

#include "ffi/device/quantize/activation_gradient_params.h"
#include "ffi/kernels/checks.h"
#include "ffi/kernels/load_kernel.h"
#include "ffi/kernels/matmul/activation_function.h"
#include "ffi/kernels/quantize/activation_gradient_kernels.h"
#include "ffi/runtime/cuda/device_cuda.h"

namespace jax_ep {
namespace {

static_assert(kValuesPerScale == kScaleBlock && kColumnsPerDot == kScaleBlock,
              "host and device agree");

ScaleParams Scale(const ScaleOptions& options) {
  return {.min_amax = options.min_amax,
          .inverse_largest = kInverseLargestE4M3,
          .power_of_two_scales = options.power_of_two_scales};
}

}  // namespace

Status LoadQuantizeActivationGradientKernels() {
  return LoadKernel(ActivationGradientKernelAddress(), kActivationGradientSharedBytes,
                    "loading quantize_activation_gradient");
}

Status CheckQuantizeActivationGradientLaunch(int64_t num_rows, int64_t columns,
                                             int64_t row_blocks) {
  Status status = CheckCounts({{"M", num_rows}, {"F", columns}, {"B", row_blocks}}, kMaxItems / 2);
  if (!status.ok()) return status;
  if (columns % kScaleBlock != 0) {
    return Unimplemented("F is ", columns, "; the kernels take multiples of ", kScaleBlock);
  }
  const double blocks = static_cast<double>(row_blocks) * (columns / kScaleBlock);
  return CheckScaleBlocks(blocks);
}

Status LaunchQuantizeActivationGradient(const QuantizeActivationGradient& call,
                                        cudaStream_t stream) {
  Status status =
      CheckQuantizeActivationGradientLaunch(call.num_rows, call.columns, call.row_blocks);
  const int64_t column_blocks = call.columns / kScaleBlock;
  const auto blocks = static_cast<unsigned>(call.row_blocks * column_blocks);
  if (!status.ok() || blocks == 0) return status;
  const struct {
    const char* name;
    const void* array;
  } aligned[] = {{"activations_gradient", call.activations_gradient},
                 {"pre_activation", call.pre_activation},
                 {"row_values", call.row_values},
                 {"values", call.values},
                 {"activation_values", call.activation_values}};
  for (const auto& [name, array] : aligned) {
    if (IsAligned(array, kVectorBytes)) continue;
    return FailedPrecondition(name, " begins at an address that is no multiple of ", kVectorBytes,
                              "; the kernels read whole vectors. Copy the array first");
  }
  const auto transposed = [&](int64_t columns, const ScaleOptions& options, uint8_t* values,
                              float* scales) {
    QuantizeTransposedParams params = {};
    params.first_rows = call.first_rows;
    params.num_rows = call.block_rows;
    params.values = values;
    params.scales = scales;
    params.rows = static_cast<int32_t>(call.num_rows);
    params.columns = static_cast<int32_t>(columns);
    params.column_blocks = static_cast<int32_t>(columns / kScaleBlock);
    params.scale = Scale(options);
    return params;
  };
  ActivationGradientParams params = {
      .activations_gradient = call.activations_gradient,
      .pre_activation = call.pre_activation,
      .row_weights = call.row_weights,
      .row_dots = call.row_dots,
      .activation = MakeActivationFunction(call.activation),
      .activations = transposed(call.columns, call.of_activations, call.activation_values,
                                call.activation_scales),
      .pre_activation_gradient =
          transposed(2 * call.columns, call.of_gradient, call.values, call.scales)};
  params.pre_activation_gradient.row_values = call.row_values;
  params.pre_activation_gradient.row_scales = call.row_scales;
  void* arguments[] = {&params};
  return FromCuda(cudaLaunchKernel(ActivationGradientKernelAddress(), dim3(blocks),
                                   dim3(kActivationGradientThreads), arguments,
                                   static_cast<size_t>(kActivationGradientSharedBytes), stream),
                  "quantize_activation_gradient");
}

}  // namespace jax_ep
