// Quantizes matrices in blocks of 128 x 128, in one pass over memory, for sm_80 and newer.
//
// A thread block takes a block of values, which it holds in registers.
#include "ffi/device/ptx/eight_bit_types.cuh"
#include "ffi/device/ptx/memory.cuh"
#include "ffi/device/quantize/elements.cuh"
#include "ffi/device/quantize/scale.cuh"
#include "ffi/device/quantize/transpose_block.cuh"
#include "ffi/device/quantize/weights_params.h"
#include "ffi/kernels/quantize/weights_kernels.h"

namespace jax_ep {
namespace {

using namespace transpose;

// The block of values of a thread block, and the thread's values in it.
struct Place {
  int64_t matrix;
  int row_block, column_block;
  int row, column;  // the thread's first, in the matrix
};

template <typename Type>
__device__ Place FindPlace(const QuantizeWeightsParams& params) {
  const uint32_t column_blocks = params.column_blocks;
  const uint32_t row_of_blocks = blockIdx.x / column_blocks;
  Place place;
  place.column_block = blockIdx.x % column_blocks;
  place.row_block = row_of_blocks % static_cast<uint32_t>(params.row_blocks);
  place.matrix = row_of_blocks / static_cast<uint32_t>(params.row_blocks);
  place.row = place.row_block * kBlock + ThreadChunk<Type>() * kThreadRows;
  place.column = place.column_block * kBlock + ThreadColumn<Type>();
  return place;
}

// Loads the thread's rows. Elements outside of the matrix are zeros.
template <typename Type, bool kIsAligned>
__device__ void LoadRows(const QuantizeWeightsParams& params, const Place& place,
                         uint4 (&vectors)[kThreadRows]) {
  const int num_rows = place.column < params.columns ? params.rows - place.row : 0;
  const int64_t first = (place.matrix * params.rows + place.row) * params.columns + place.column;
  const uint4* const vector = static_cast<const uint4*>(params.x) + first / kPerVector<Type>;
  const int stride = params.columns / kPerVector<Type>;
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    if (i >= num_rows) {
      vectors[i] = make_uint4(0, 0, 0, 0);
    } else if constexpr (kIsAligned) {
      vectors[i] = LoadGlobalNoAllocate(vector + i * stride);
    } else {
      vectors[i] = LoadElements<Type>(params.x, first + int64_t{i} * params.columns,
                                      params.columns - place.column);
    }
  }
}

// Called by one thread.
__device__ void StoreScales(const QuantizeWeightsParams& params, const Place& place, float scale) {
  if (const QuantizedMatrices& out = params.as_given; out.values != nullptr) {
    out.scales[place.matrix * out.matrix_scale_stride + place.row_block * out.scale_stride +
               place.column_block] = scale;
  }
  if (const QuantizedMatrices& out = params.transposed; out.values != nullptr) {
    out.scales[place.matrix * out.matrix_scale_stride + place.column_block * out.scale_stride +
               place.row_block] = scale;
  }
}

// Stores the thread's rows as x has them.
template <bool kIsAligned, int kCount>
__device__ void StoreRows(const QuantizeWeightsParams& params, const Place& place,
                          const uint32_t (&words)[kThreadRows][kCount]) {
  const QuantizedMatrices& out = params.as_given;
  const int num_rows = place.column < params.columns ? params.rows - place.row : 0;
  uint8_t* to = out.values + place.matrix * out.matrix_value_stride + place.row * out.value_stride +
                place.column;
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i, to += out.value_stride) {
    if (i >= num_rows) break;
    if constexpr (!kIsAligned) {
      StoreBytes(to, words[i], Min(4 * kCount, params.columns - place.column));
    } else if constexpr (kCount == 2) {
      *reinterpret_cast<uint2*>(to) = make_uint2(words[i][0], words[i][1]);
    } else {
      *reinterpret_cast<uint32_t*>(to) = words[i][0];
    }
  }
}

// Copies the transposed block from shared memory, 16 bytes per thread at a time.
template <typename Type, bool kIsAligned>
__device__ void StoreTransposed(const QuantizeWeightsParams& params, const Place& place,
                                const uint2* tile) {
  const QuantizedMatrices& out = params.transposed;
  uint8_t* const matrix = out.values + place.matrix * out.matrix_value_stride;
#pragma unroll
  for (int first = 0; first < kTransposedVectors; first += kThreads<Type>) {
    const int vector = first + static_cast<int>(threadIdx.x);
    const int column = vector / kVectorsPerTransposedRow;
    const int chunk = vector % kVectorsPerTransposedRow * 2;
    const int out_row = place.column_block * kBlock + column;
    const int out_column = place.row_block * kBlock + chunk * kChunkBytes;
    if (out_row >= params.columns || out_column >= params.rows) continue;
    const uint4 loaded = LoadChunks<Type>(tile, column, chunk);
    uint8_t* const to = matrix + out_row * out.value_stride + out_column;
    if constexpr (kIsAligned) {
      *reinterpret_cast<uint4*>(to) = loaded;
    } else {
      const uint32_t words[] = {loaded.x, loaded.y, loaded.z, loaded.w};
      StoreBytes(to, words, Min(static_cast<int>(sizeof loaded), params.rows - out_column));
    }
  }
}

}  // namespace

template <typename Type, bool kIsAligned>
__global__ void __launch_bounds__(kThreads<Type>, 1024 / kThreads<Type>)
    QuantizeWeightsKernel(const __grid_constant__ QuantizeWeightsParams params) {
  __shared__ uint4 tile[kBlock * kVectorsPerTransposedRow];
  const Place place = FindPlace<Type>(params);
  uint4 vectors[kThreadRows];
  LoadRows<Type, kIsAligned>(params, place, vectors);
  uint32_t amax = 0;
#pragma unroll
  for (const uint4& vector : vectors) amax = max(amax, AmaxBits<Type>(vector));
  const float scale = ScaleOf(params.scale, AmaxOfBlock<kThreads<Type>>(amax));
  const float factor = __frcp_rn(scale);
  if (threadIdx.x == 0) StoreScales(params, place, scale);
  uint32_t words[kThreadRows][kWords<Type>];
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    float values[kPerVector<Type>];
    UnpackVector<Type>(vectors[i], values);
#pragma unroll
    for (float& value : values) value = __fmul_rn(value, factor);
#pragma unroll
    for (int w = 0; w < kWords<Type>; ++w) words[i][w] = E4M3::Pack(values + 4 * w);
  }
  if (params.as_given.values != nullptr) StoreRows<kIsAligned>(params, place, words);
  if (params.transposed.values == nullptr) return;
  StoreChunks<Type>(reinterpret_cast<uint2*>(tile), words);
  __syncthreads();
  StoreTransposed<Type, kIsAligned>(params, place, reinterpret_cast<const uint2*>(tile));
}

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // NVRTC compiles the device code only

namespace jax_ep {
namespace {

template <typename Type>
const void* KernelOf(bool is_aligned) {
  return is_aligned ? reinterpret_cast<const void*>(QuantizeWeightsKernel<Type, true>)
                    : reinterpret_cast<const void*>(QuantizeWeightsKernel<Type, false>);
}

}  // namespace

int QuantizeWeightsThreads(ElementType type) {
  return type == kF32 ? kThreads<Float32> : kThreads<BFloat16>;
}

const void* QuantizeWeightsKernelAddress(ElementType type, bool is_aligned) {
  return type == kF32    ? KernelOf<Float32>(is_aligned)
         : type == kBF16 ? KernelOf<BFloat16>(is_aligned)
                         : KernelOf<Float16>(is_aligned);
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
