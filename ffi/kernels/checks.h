// Checks of arguments that the launches of several kernels make.
#ifndef JAX_EP_KERNELS_CHECKS_H_
#define JAX_EP_KERNELS_CHECKS_H_

#include <cstdint>
#include <initializer_list>
#include <limits>

#include "ffi/device/common/limits.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

inline bool IsAligned(const void* address, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

struct NamedCount {
  const char* name;
  int64_t value;
};

// Checks that no count is more than the kernels take.
inline Status CheckCounts(std::initializer_list<NamedCount> counts, int64_t most = kMaxItems) {
  for (const auto& [name, value] : counts) {
    if (value < 0 || value > most) {
      return Unimplemented(name, " is ", value, "; the kernels take up to ", most);
    }
  }
  return {};
}

// Checks that a grid can have a thread block for each block of 128 x 128.
inline Status CheckScaleBlocks(double blocks) {
  if (blocks <= std::numeric_limits<int32_t>::max()) return {};
  return Unimplemented("there are ", blocks, " blocks of 128 x 128; the kernels take up to ",
                       std::numeric_limits<int32_t>::max());
}

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_CHECKS_H_
