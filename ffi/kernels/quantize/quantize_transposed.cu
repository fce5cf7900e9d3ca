// Quantizes the rows of groups to blocks of 128 rows, transposed, in one pass over memory, for
// sm_80 and newer.
//
// 8-bit wgmma reads both operands along k, and in a weight gradient k runs over a group's rows. A
// thread block takes 128 columns of a row block, which it holds in registers. Every row block has
// an array [columns, 128] of its own. So a group begins at a multiple of what TMA needs, however
// many rows the groups before it have, and a thread block writes 16 KB side by side.
#include "ffi/device/ptx/eight_bit_types.cuh"
#include "ffi/device/ptx/memory.cuh"
#include "ffi/device/quantize/elements.cuh"
#include "ffi/device/quantize/scale.cuh"
#include "ffi/device/quantize/transpose_block.cuh"
#include "ffi/device/quantize/transposed_params.h"
#include "ffi/kernels/quantize/transposed_kernels.h"

namespace jax_ep {
namespace {

using namespace transpose;

// The rows and columns of a thread block, and the thread's values in it.
struct Place {
  int row_block, column_block;
  int num_rows;  // the thread's rows that are the group's
  int64_t row;   // the thread's first
  int column;
};

template <typename Type>
__device__ Place FindPlace(const QuantizeTransposedParams& params) {
  Place place;
  place.column_block = blockIdx.x % static_cast<uint32_t>(params.column_blocks);
  place.row_block = blockIdx.x / static_cast<uint32_t>(params.column_blocks);
  place.column = place.column_block * kBlock + ThreadColumn<Type>();
  const int first = params.first_rows[place.row_block];
  // Rows outside of x are read by no thread, whatever the arrays hold.
  const int rows = Min(params.num_rows[place.row_block], params.rows - first);
  const int row = ThreadChunk<Type>() * kThreadRows;
  place.row = first + row;
  place.num_rows = first < 0 || place.column >= params.columns ? 0 : rows - row;
  return place;
}

// The thread's rows in registers: 16 or 32 bits of each value. Those outside of the row block are
// zeros.
template <typename T>
struct FloatRows {
  using Type = T;

  uint4 vectors[kThreadRows];

  template <bool kIsAligned>
  __device__ void Load(const QuantizeTransposedParams& params, const Place& place) {
    const int64_t first = place.row * params.columns + place.column;
    const uint4* const vector = static_cast<const uint4*>(params.x) + first / kPerVector<T>;
    const int stride = params.columns / kPerVector<T>;
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      if (i >= place.num_rows) {
        vectors[i] = make_uint4(0, 0, 0, 0);
      } else if constexpr (kIsAligned) {
        vectors[i] = LoadGlobalNoAllocate(vector + int64_t{i} * stride);
      } else {
        vectors[i] = LoadElements<T>(params.x, first + int64_t{i} * params.columns,
                                     params.columns - place.column);
      }
    }
  }

  __device__ void Unpack(int i, float (&values)[kPerVector<T>]) const {
    UnpackVector<T>(vectors[i], values);
  }

  // Returns the bits of the largest magnitude of each column. Magnitudes of 16 bits are compared as
  // integers, and one of each pair in the upper half of its word.
  __device__ void ColumnAmaxBits(uint32_t (&amax)[kPerVector<T>]) const {
    constexpr int kPerWord = T::kPerWord;
    uint32_t low[4] = {}, high[4] = {};
#pragma unroll
    for (const uint4& vector : vectors) {
      const uint32_t words[] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        if constexpr (kPerWord == 2) low[w] = max(low[w], words[w] & 0x7fffu);
        high[w] = max(high[w], words[w] & (kPerWord == 2 ? 0x7fff0000u : 0x7fffffffu));
      }
    }
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float largest[kPerWord];
      T::Unpack(high[w] | low[w], largest);
#pragma unroll
      for (int i = 0; i < kPerWord; ++i) amax[kPerWord * w + i] = __float_as_uint(largest[i]);
    }
  }
};

// The same of E4M3 values with scales, eight of each row as of 16-bit types.
struct EightBitRows {
  using Type = BFloat16;
  static constexpr int kCount = kPerVector<Type>;
  static_assert(kCount == 8, "a vector is two words");

  uint2 vectors[kThreadRows];
  float scales[kThreadRows];

  template <bool kIsAligned>
  __device__ void Load(const QuantizeTransposedParams& params, const Place& place) {
    const auto* const x = static_cast<const uint8_t*>(params.x) + place.column;
    const int scale = params.x_scales_per_row > 1 ? place.column_block : 0;
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      vectors[i] = make_uint2(0, 0);
      scales[i] = 0;
      if (i >= place.num_rows) continue;
      const int64_t row = place.row + i;
      scales[i] = __ldg(params.x_scales + row * params.x_scales_per_row + scale);
      if constexpr (kIsAligned) {
        vectors[i] = __ldg(reinterpret_cast<const uint2*>(x + row * params.columns));
      } else {
        uint32_t words[2] = {};
        for (int j = 0; j < Min(kCount, params.columns - place.column); ++j) {
          words[j / 4] |= uint32_t{x[row * params.columns + j]} << j % 4 * 8;
        }
        vectors[i] = make_uint2(words[0], words[1]);
      }
    }
  }

  __device__ void Unpack(int i, float (&values)[kCount]) const {
    float low[4], high[4];
    E4M3::Unpack(vectors[i].x, low);
    E4M3::Unpack(vectors[i].y, high);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      values[j] = __fmul_rn(low[j], scales[i]);
      values[4 + j] = __fmul_rn(high[j], scales[i]);
    }
  }

  __device__ void ColumnAmaxBits(uint32_t (&amax)[kCount]) const {
#pragma unroll
    for (uint32_t& each : amax) each = 0;
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      float values[kCount];
      Unpack(i, values);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        amax[j] = max(amax[j], __float_as_uint(values[j]) & 0x7fffffffu);
      }
    }
  }
};

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

template <typename Rows, bool kPerColumn, bool kIsAligned>
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

template <typename Rows, bool kPerColumn>
const void* KernelOf(bool is_aligned) {
  return is_aligned
             ? reinterpret_cast<const void*>(QuantizeTransposedKernel<Rows, kPerColumn, true>)
             : reinterpret_cast<const void*>(QuantizeTransposedKernel<Rows, kPerColumn, false>);
}

template <typename Rows>
const void* KernelOf(bool per_column, bool is_aligned) {
  return per_column ? KernelOf<Rows, true>(is_aligned) : KernelOf<Rows, false>(is_aligned);
}

}  // namespace

int QuantizeTransposedThreads(ElementType type) {
  return type == kF32 ? kThreads<Float32> : kThreads<BFloat16>;
}

const void* QuantizeTransposedKernelAddress(ElementType type, bool per_column, bool is_aligned) {
  return type == kF32      ? KernelOf<FloatRows<Float32>>(per_column, is_aligned)
         : type == kBF16   ? KernelOf<FloatRows<BFloat16>>(per_column, is_aligned)
         : type == kF8E4M3 ? KernelOf<EightBitRows>(per_column, is_aligned)
                           : KernelOf<FloatRows<Float16>>(per_column, is_aligned);
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
