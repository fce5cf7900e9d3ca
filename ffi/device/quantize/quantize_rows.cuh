// Quantizes the rows of a row block as they are, with a scale per row and 128 columns.
#ifndef JAX_EP_DEVICE_QUANTIZE_QUANTIZE_ROWS_CUH_
#define JAX_EP_DEVICE_QUANTIZE_QUANTIZE_ROWS_CUH_

#include "ffi/device/quantize/row_block.cuh"
#include "ffi/device/quantize/scale.cuh"

namespace jax_ep::transpose {

// Returns the reduction of values[threadIdx.x % 8] among all lanes that have the row. Lanes halve
// their rows in each step, which takes fewer shuffles than a reduction per row.
template <typename Type, typename T, typename Function>
__device__ T ReduceRows(T (&values)[kThreadRows], Function reduce) {
#pragma unroll
  for (int half = kThreadRows / 2; half > 0; half /= 2) {
    const bool is_upper = (threadIdx.x & half) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const T kept = is_upper ? values[i + half] : values[i];
      const T given = is_upper ? values[i] : values[i + half];
      values[i] = reduce(kept, __shfl_xor_sync(0xffffffffu, given, half));
    }
  }
  T reduced = values[0];
#pragma unroll
  for (int lanes = kThreadRows; lanes < kVectorsPerBlockRow<Type>; lanes *= 2) {
    reduced = reduce(reduced, __shfl_xor_sync(0xffffffffu, reduced, lanes));
  }
  return reduced;
}

// Returns whether the thread is the one of those with row threadIdx.x % 8 that stores its
// reduction.
template <typename Type>
__device__ bool StoresRow() {
  return ThreadColumn<Type>() < kThreadRows * kPerVector<Type>;
}

// Every thread of the block calls this once.
template <bool kIsAligned, typename Type>
__device__ void QuantizeRows(const QuantizeTransposedParams& params, const Place& place,
                             const FloatRows<Type>& rows) {
  uint32_t amax[kThreadRows];
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) amax[i] = AmaxBits<Type>(rows.vectors[i]);
  const auto larger = [](uint32_t a, uint32_t b) { return max(a, b); };
  const float scale = ScaleOf(params.scale, ReduceRows<Type>(amax, larger));
  const float factor = __frcp_rn(scale);
  const int own_row = static_cast<int>(threadIdx.x) % kThreadRows;
  // Asks the first lane of the row, whose columns are always columns of x.
  const int num_rows = __shfl_sync(0xffffffffu, place.num_rows, 0, kVectorsPerBlockRow<Type>);
  if (StoresRow<Type>() && own_row < num_rows) {
    params.row_scales[(place.row + own_row) * params.column_blocks + place.column_block] = scale;
  }
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    const float factor_of_row = __shfl_sync(0xffffffffu, factor, i, kThreadRows);
    if (i >= place.num_rows) continue;
    float values[kPerVector<Type>];
    rows.Unpack(i, values);
#pragma unroll
    for (float& value : values) value = __fmul_rn(value, factor_of_row);
    uint32_t words[kWords<Type>];
#pragma unroll
    for (int w = 0; w < kWords<Type>; ++w) words[w] = E4M3::Pack(values + 4 * w);
    uint8_t* const out = params.row_values + (place.row + i) * params.columns + place.column;
    if constexpr (!kIsAligned) {
      StoreBytes(out, words, Min(kPerVector<Type>, params.columns - place.column));
    } else if constexpr (kWords<Type> == 2) {
      *reinterpret_cast<uint2*>(out) = make_uint2(words[0], words[1]);
    } else {
      *reinterpret_cast<uint32_t*>(out) = words[0];
    }
  }
}

}  // namespace jax_ep::transpose

#endif  // JAX_EP_DEVICE_QUANTIZE_QUANTIZE_ROWS_CUH_
