// Rows of a row block in registers: 128 columns by a thread block, eight rows by a thread.
#ifndef JAX_EP_DEVICE_QUANTIZE_ROW_BLOCK_CUH_
#define JAX_EP_DEVICE_QUANTIZE_ROW_BLOCK_CUH_

#include "ffi/device/ptx/eight_bit_types.cuh"
#include "ffi/device/ptx/memory.cuh"
#include "ffi/device/quantize/elements.cuh"
#include "ffi/device/quantize/transpose_block.cuh"
#include "ffi/device/quantize/transposed_params.h"

namespace jax_ep::transpose {

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

}  // namespace jax_ep::transpose

#endif  // JAX_EP_DEVICE_QUANTIZE_ROW_BLOCK_CUH_
