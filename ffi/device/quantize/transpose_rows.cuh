// Quantizes the rows of a row block, transposed, with a scale per column or one for 128 columns.
#ifndef JAX_EP_DEVICE_QUANTIZE_TRANSPOSE_ROWS_CUH_
#define JAX_EP_DEVICE_QUANTIZE_TRANSPOSE_ROWS_CUH_

#include "ffi/device/quantize/row_block.cuh"
#include "ffi/device/quantize/scale.cuh"

namespace jax_ep::transpose {

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

// Every thread of the block calls this, with the rows that it holds. A barrier separates calls with
// the same tile.
template <bool kPerColumn, typename Rows>
__device__ void TransposeRows(const QuantizeTransposedParams& params, const Place& place,
                              const Rows& rows, uint4 (&tile)[kTransposedVectors]) {
  using Type = Rows::Type;
  static_assert(sizeof tile >= kChunksPerRow * kBlock * sizeof(uint32_t));
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

}  // namespace jax_ep::transpose

#endif  // JAX_EP_DEVICE_QUANTIZE_TRANSPOSE_ROWS_CUH_
