// Quantizes the rows of a row block as they are, with a scale per row and 128 columns.
#ifndef JAX_EP_DEVICE_QUANTIZE_QUANTIZE_ROWS_CUH_
#define JAX_EP_DEVICE_QUANTIZE_QUANTIZE_ROWS_CUH_

#include "ffi/device/quantize/row_block.cuh"
#include "ffi/device/quantize/scale.cuh"

namespace jax_ep::transpose {

// Returns the bits of the largest magnitude of the thread's row threadIdx.x % 8, among all lanes
// that have the row. Lanes halve their rows in each step, which takes fewer shuffles than a maximum
// per row.
template <typename Type>
__device__ uint32_t AmaxOfRow(const FloatRows<Type>& rows) {
  uint32_t amax[kThreadRows];
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) amax[i] = AmaxBits<Type>(rows.vectors[i]);
#pragma unroll
  for (int half = kThreadRows / 2; half > 0; half /= 2) {
    const bool is_upper = (threadIdx.x & half) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const uint32_t kept = is_upper ? amax[i + half] : amax[i];
      const uint32_t given = is_upper ? amax[i] : amax[i + half];
      amax[i] = max(kept, __shfl_xor_sync(0xffffffffu, given, half));
    }
  }
  uint32_t largest = amax[0];
#pragma unroll
  for (int lanes = kThreadRows; lanes < kVectorsPerBlockRow<Type>; lanes *= 2) {
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
  }
  return largest;
}

// Every thread of the block calls this once.
template <bool kIsAligned, typename Type>
__device__ void QuantizeRows(const QuantizeTransposedParams& params, const Place& place,
                             const FloatRows<Type>& rows) {
  const float scale = ScaleOf(params.scale, AmaxOfRow(rows));
  const float factor = __frcp_rn(scale);
  const int own_row = static_cast<int>(threadIdx.x) % kThreadRows;
  // Eight of the lanes with the same rows store their scales. The first of these has columns of x.
  const int num_rows = __shfl_sync(0xffffffffu, place.num_rows, 0, kVectorsPerBlockRow<Type>);
  if (ThreadColumn<Type>() < kThreadRows * kPerVector<Type> && own_row < num_rows) {
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
