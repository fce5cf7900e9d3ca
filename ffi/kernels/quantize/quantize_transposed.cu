// Quantizes the rows of groups to blocks of 128 rows, transposed, in one pass over memory, for
// sm_80 and newer. The same pass may quantize the rows as they are, too.
//
// 8-bit wgmma reads both operands along k, and in a weight gradient k runs over a group's rows. A
// thread block takes 128 columns of a row block, which it holds in registers. Every row block has
// an array [columns, 128] of its own. So a group begins at a multiple of what TMA needs, however
// many rows the groups before it have, and a thread block writes 16 KB side by side.
#include "ffi/device/quantize/quantize_rows.cuh"
#include "ffi/device/quantize/row_block.cuh"
#include "ffi/device/quantize/transpose_rows.cuh"
#include "ffi/device/quantize/transposed_params.h"
#include "ffi/kernels/quantize/transposed_kernels.h"

namespace jax_ep {
namespace {

using namespace transpose;

}  // namespace

template <typename Rows, bool kPerColumn, bool kIsAligned, bool kWithRows>
__global__ void __launch_bounds__(kThreads<typename Rows::Type>,
                                  1024 / kThreads<typename Rows::Type>)
    QuantizeTransposedKernel(const __grid_constant__ QuantizeTransposedParams params) {
  using Type = Rows::Type;
  __shared__ uint4 tile[kTransposedVectors];
  const Place place = FindPlace<Type>(params);
  if (!params.zero_tail && params.num_rows[place.row_block] <= 0) return;
  Rows rows;
  rows.template Load<kIsAligned>(params, place);
  if constexpr (kWithRows) QuantizeRows<kIsAligned>(params, place, rows);
  TransposeRows<kPerColumn>(params, place, rows, tile);
}

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // NVRTC compiles the device code only

namespace jax_ep {
namespace {

template <typename Rows, bool kWithRows>
const void* KernelOf(bool per_column, bool is_aligned) {
  const auto kernel = per_column
                          ? (is_aligned ? QuantizeTransposedKernel<Rows, true, true, kWithRows>
                                        : QuantizeTransposedKernel<Rows, true, false, kWithRows>)
                          : (is_aligned ? QuantizeTransposedKernel<Rows, false, true, kWithRows>
                                        : QuantizeTransposedKernel<Rows, false, false, kWithRows>);
  return reinterpret_cast<const void*>(kernel);
}

template <typename Type>
const void* KernelOf(bool per_column, bool is_aligned, bool with_rows) {
  return with_rows ? KernelOf<FloatRows<Type>, true>(per_column, is_aligned)
                   : KernelOf<FloatRows<Type>, false>(per_column, is_aligned);
}

}  // namespace

int QuantizeTransposedThreads(ElementType type) {
  return type == kF32 ? kThreads<Float32> : kThreads<BFloat16>;
}

const void* QuantizeTransposedKernelAddress(ElementType type, bool per_column, bool is_aligned,
                                            bool with_rows) {
  return type == kF32      ? KernelOf<Float32>(per_column, is_aligned, with_rows)
         : type == kBF16   ? KernelOf<BFloat16>(per_column, is_aligned, with_rows)
         : type == kF8E4M3 ? KernelOf<EightBitRows, false>(per_column, is_aligned)
                           : KernelOf<Float16>(per_column, is_aligned, with_rows);
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
