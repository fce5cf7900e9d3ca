// Replaces tests/cpp/gpu/for_each.h: loops of this thread.
#ifndef JAX_EP_TESTS_CPP_GPU_FOR_EACH_H_
#define JAX_EP_TESTS_CPP_GPU_FOR_EACH_H_

#include <algorithm>
#include <cstdint>

#include "tests/cpp/gpu/require.h"

namespace harness {

template <typename Function>
void ForEach(int64_t count, const Function& function) {
  for (int64_t i = 0; i < count; ++i) function(i);
}

inline void MaxInto(unsigned long long* to, unsigned long long value) {
  *to = std::max(*to, value);
}

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_FOR_EACH_H_
