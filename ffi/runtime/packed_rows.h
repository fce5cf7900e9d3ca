// Quantized rows in flight: a row's values, its scales from a multiple of four bytes on, and zeros
// up to a vector.
#ifndef JAX_EP_RUNTIME_PACKED_ROWS_H_
#define JAX_EP_RUNTIME_PACKED_ROWS_H_

#include <cstdint>

#include "ffi/device/common/integers.h"
#include "ffi/device/common/limits.h"

namespace jax_ep {

inline constexpr int64_t kScaleBytes = 4;

// Where a row's scales begin, in scales.
constexpr int64_t FirstScale(int64_t columns) { return CeilDivide(columns, kScaleBytes); }

constexpr int64_t PackedRowBytes(int64_t columns, int64_t num_scales) {
  const int64_t bytes = (FirstScale(columns) + num_scales) * kScaleBytes;
  return CeilDivide(bytes, kVectorBytes) * kVectorBytes;
}

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_PACKED_ROWS_H_
