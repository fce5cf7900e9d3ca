// Limits of the kernels. Python gets them from the compiled module (jax_ep._ffi.limits).
#ifndef JAX_EP_DEVICE_COMMON_LIMITS_H_
#define JAX_EP_DEVICE_COMMON_LIMITS_H_

#include "ffi/device/common/integers.h"

namespace jax_ep {

// Ranks per group: a rank fits into a byte.
inline constexpr int kMaxRanks = 256;

// Experts per token (top-k): each lane of a warp holds up to two assignments.
inline constexpr int kMaxTopK = 64;

// Experts of all ranks: one count per expert and warp fits into shared memory.
inline constexpr int kMaxExperts = 2048;

// Rows, assignments, columns: 32-bit counters, with room to count past the end.
inline constexpr int kMaxItems = 1 << 30;

// Grouped matmuls of compiled programs that schedule their tiles by a counter; more do without.
inline constexpr int kNumTileCounters = 1 << 16;

// GPUs whose kernels multiply 8-bit operands: ten times the compute capability.
inline constexpr int kEightBitCapability = 90;

// The unit in which rows are moved: 16 bytes.
inline constexpr int64_t kVectorBytes = 16;

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_COMMON_LIMITS_H_
