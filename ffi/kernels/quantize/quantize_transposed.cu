// Quantizes the rows of groups to blocks of 128 rows, transposed, in one pass over memory, for
// sm_80 and newer. The same pass may quantize the rows as they are, too.
//
// 8-bit wgmma reads both operands along k, and in a weight gradient k runs over a group's rows. A
// thread block takes 128 columns of a row block, which it holds in registers. Every row block has
// an array [columns, 128] of its own. So a group begins at a multiple of what TMA needs, however
// many rows the groups before it have, and a thread block writes 16 KB side by side.
#include "ffi/device/ptx/eight_bit_types.cuh"
#include "ffi/device/quantize/quantize_rows.cuh"
#include "ffi/device/quantize/row_block.cuh"
#include "ffi/device/quantize/scale.cuh"
#include "ffi/device/quantize/transpose_block.cuh"
#include "ffi/device/quantize/transposed_params.h"
#include "ffi/kernels/quantize/transposed_kernels.h"

namespace jax_ep {
namespace {

using namespace transpose;

// Every thread of the block calls this once. Returns the factors of the thread's columns, and
// stores the scales. `shared` holds 16 x 128 words, and is read no more when this returns.
template <typename Type>
__device__ void ScaleColumns(const QuantizeTransposedParams& params, const Place& place,
                             const uint32_t (&amax)[kPerVector<Type>], uint32_t* shared,
                             float (&factors)[kPerVector<Type>]) {
  __shared__ float of_columns[kBlock];
  uint32_t* const own = shared + ThreadChunk<Type>() * kBlock + ThreadColumn<Type>();
#pragma unroll
  for (int i = 0; i < kPerVector<Type>; ++i) own[i] = amax[i];
  __syncthreads();
  if (threadIdx.x < kBlock) {
    uint32_t largest = 0;
#pragma unroll
    for (int chunk = 0; chunk < kChunksPerRow; ++chunk) {
      largest = max(largest, shared[chunk * kBlock + threadIdx.x]);
    }
    const float scale = ScaleOf(params.scale, largest);
    of_columns[threadIdx.x] = __frcp_rn(scale);
    const int column = place.column_block * kBlock + static_cast<int>(threadIdx.x);
    if (column < params.columns) {
      params.scales[int64_t{place.row_block} * params.columns + column] = scale;
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kPerVector<Type>; ++i) factors[i] = of_columns[ThreadColumn<Type>() + i];
}

// The same with one scale.
template <typename Type>
__device__ void ScaleBlock(const QuantizeTransposedParams& params, const Place& place,
                           const uint32_t (&amax)[kPerVector<Type>],
                           float (&factors)[kPerVector<Type>]) {
  uint32_t largest = 0;
#pragma unroll
  for (uint32_t each : amax) largest = max(largest, each);
  const float scale = ScaleOf(params.scale, AmaxOfBlock<kThreads<Type>>(largest));
  if (threadIdx.x == 0) {
    params.scales[int64_t{place.row_block} * params.column_blocks + place.column_block] = scale;
  }
  const float factor = __frcp_rn(scale);
#pragma unroll
  for (float& each : factors) each = factor;
}

// Copies the transposed block from shared memory, 16 bytes per thread at a time.
template <typename Type>
__device__ void StoreTransposed(const QuantizeTransposedParams& params, const Place& place,
                                const uint2* tile) {
  const int64_t first_column =
      int64_t{place.row_block} * params.columns + place.column_block * kBlock;
  uint4* const to = reinterpret_cast<uint4*>(params.values + first_column * kBlock);
  const int num_columns = params.columns - place.column_block * kBlock;
#pragma unroll
  for (int first = 0; first < kTransposedVectors; first += kThreads<Type>) {
    const int vector = first + static_cast<int>(threadIdx.x);
    const int column = vector / kVectorsPerTransposedRow;
    if (column >= num_columns) continue;
    to[vector] = LoadChunks<Type>(tile, column, vector % kVectorsPerTransposedRow * 2);
  }
}

}  // namespace

template <typename Rows, bool kPerColumn, bool kIsAligned, bool kWithRows>
__global__ void __launch_bounds__(kThreads<typename Rows::Type>,
                                  1024 / kThreads<typename Rows::Type>)
    QuantizeTransposedKernel(const __grid_constant__ QuantizeTransposedParams params) {
  using Type = Rows::Type;
  __shared__ uint4 tile[kTransposedVectors];
  static_assert(sizeof tile >= kChunksPerRow * kBlock * sizeof(uint32_t));
  const Place place = FindPlace<Type>(params);
  if (!params.zero_tail && params.num_rows[place.row_block] <= 0) return;
  Rows rows;
  rows.template Load<kIsAligned>(params, place);
  if constexpr (kWithRows) QuantizeRows<kIsAligned>(params, place, rows);
  uint32_t amax[kPerVector<Type>];
  rows.ColumnAmaxBits(amax);
  float factors[kPerVector<Type>];
  if constexpr (kPerColumn) {
    ScaleColumns<Type>(params, place, amax, reinterpret_cast<uint32_t*>(tile), factors);
  } else {
    ScaleBlock<Type>(params, place, amax, factors);
  }
  uint32_t words[kThreadRows][kWords<Type>];
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    float values[kPerVector<Type>];
    rows.Unpack(i, values);
#pragma unroll
    for (int j = 0; j < kPerVector<Type>; ++j) values[j] = __fmul_rn(values[j], factors[j]);
#pragma unroll
    for (int w = 0; w < kWords<Type>; ++w) words[i][w] = E4M3::Pack(values + 4 * w);
  }
  StoreChunks<Type>(reinterpret_cast<uint2*>(tile), words);
  __syncthreads();
  StoreTransposed<Type>(params, place, reinterpret_cast<const uint2*>(tile));
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
