// Limits of the kernels. Python gets them from the compiled module (jax_ep._ffi.limits).
#ifndef JAX_EP_DEVICE_COMMON_LIMITS_H_
#define JAX_EP_DEVICE_COMMON_LIMITS_H_

#include "ffi/device/common/integers.h"

namespace jax_ep {

// Ranks of a group: a set of ranks is a 64-bit mask.
inline constexpr int kMaxRanks = 64;

// Assignments per token: each lane of a warp owns two.
inline constexpr int kMaxTopK = 64;

// Experts of all ranks: a count per expert and warp fits into a block's shared memory.
inline constexpr int kMaxExperts = 2048;

// Rows, assignments, columns: they are counted in 32 bits, with room to count past the end.
inline constexpr int kMaxItems = 1 << 30;

// Rows move in vectors of 16 bytes.
inline constexpr int64_t kVectorBytes = 16;

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_COMMON_LIMITS_H_
