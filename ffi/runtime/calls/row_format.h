// A row has the type of its values, their scales if there are any, and an alignment. From
// this follow its bytes in an operand, in the workspace, where peers store it, and in a result.
#ifndef JAX_EP_RUNTIME_CALLS_ROW_FORMAT_H_
#define JAX_EP_RUNTIME_CALLS_ROW_FORMAT_H_

#include <cstdint>

#include "ffi/device/common/integers.h"
#include "ffi/device/common/limits.h"
#include "ffi/runtime/calls/buffers.h"

namespace jax_ep {

struct RowFormat {
  ElementType payload = kOther;
  ElementType scales = kOther;       // quantized rows have them
  int64_t values_per_scale = 0;      // 0: no scales
  int64_t alignment = kVectorBytes;  // in the workspace, in bytes: bulk copies need 16

  int64_t payload_bytes(int64_t hidden) const { return hidden * ElementBytes(payload); }
  int64_t num_scales(int64_t hidden) const {
    return values_per_scale == 0 ? 0 : CeilDivide(hidden, values_per_scale);
  }
  int64_t scale_bytes(int64_t hidden) const { return num_scales(hidden) * ElementBytes(scales); }
  // In the workspace the scales follow the payload.
  int64_t wire_bytes(int64_t hidden) const {
    return CeilDivide(payload_bytes(hidden) + scale_bytes(hidden), alignment) * alignment;
  }

  friend bool operator==(const RowFormat&, const RowFormat&) = default;
};

// Rows without scales.
inline constexpr RowFormat kBFloat16Rows = {.payload = kBF16};
inline constexpr RowFormat kFloat16Rows = {.payload = kF16};
inline constexpr RowFormat kFloat32Rows = {.payload = kF32};

// Eight-bit rows. A row has a scale for every `values_per_scale` values: a float32 number, or as in
// MXFP8 a power of two, kF8E8M0, for every 32.
constexpr RowFormat QuantizedRowFormat(ElementType payload, int64_t values_per_scale,
                                       ElementType scales = kF32) {
  return {.payload = payload, .scales = scales, .values_per_scale = values_per_scale};
}
constexpr bool IsQuantized(const RowFormat& format) {
  return (format.payload == kF8E4M3 || format.payload == kF8E5M2) && format.scales != kOther &&
         format.values_per_scale > 0;
}

// A row segment of a low-latency call has a scale per lane at most (low_latency/layout.h).
inline constexpr int64_t kMinValuesPerScale = 128;

// Returns whether the kernels move rows of a format.
constexpr bool IsMoved(const RowFormat& format) {
  if (format == kBFloat16Rows || format == kFloat16Rows || format == kFloat32Rows) return true;
  return IsQuantized(format) && format.scales == kF32 &&
         format.values_per_scale >= kMinValuesPerScale;
}

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_CALLS_ROW_FORMAT_H_
