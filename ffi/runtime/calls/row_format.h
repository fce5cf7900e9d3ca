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

  int64_t payload_bytes(int64_t hidden) const {
    return CeilDivide(hidden * ElementBits(payload), 8);
  }
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

// Rows of eight or four bits, which have a scale for every `values_per_scale` values.
constexpr RowFormat QuantizedRowFormat(ElementType payload, int64_t values_per_scale,
                                       ElementType scales = kF32) {
  return {.payload = payload, .scales = scales, .values_per_scale = values_per_scale};
}
constexpr bool IsEightBit(ElementType type) { return type == kF8E4M3 || type == kF8E5M2; }
constexpr bool IsQuantized(const RowFormat& format) {
  return (IsEightBit(format.payload) || format.payload == kF4E2M1) && format.scales != kOther &&
         format.values_per_scale > 0;
}

// float32 scales are those of blocks of 128 values, or of more: whole rows.
inline constexpr int64_t kMinValuesPerFloatScale = 128;

// The least values per scale of a type: of float32, and of MXFP8, MXFP4 (E8M0) and NVFP4 (E4M3),
// which have as many. 0: no scales. A row segment of a low-latency call has room for them
// (low_latency/layout.h).
constexpr int64_t ValuesPerScale(ElementType scales) {
  if (scales == kF32) return kMinValuesPerFloatScale;
  if (scales == kF8E8M0) return 32;
  return scales == kF8E4M3 ? 16 : 0;
}

// Returns whether the kernels move rows of a format.
constexpr bool IsMoved(const RowFormat& format) {
  if (format == kBFloat16Rows || format == kFloat16Rows || format == kFloat32Rows) return true;
  if (!IsQuantized(format)) return false;
  if (format.scales == kF32) {
    return IsEightBit(format.payload) && format.values_per_scale >= kMinValuesPerFloatScale;
  }
  return format.values_per_scale == ValuesPerScale(format.scales) &&
         (format.scales == kF8E8M0 || format.payload == kF4E2M1);
}

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_CALLS_ROW_FORMAT_H_
