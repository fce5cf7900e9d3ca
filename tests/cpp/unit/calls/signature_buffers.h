// Operands and results for the tests of signatures.
#ifndef JAX_EP_TESTS_CPP_UNIT_CALLS_SIGNATURE_BUFFERS_H_
#define JAX_EP_TESTS_CPP_UNIT_CALLS_SIGNATURE_BUFFERS_H_

#include <vector>

#include "ffi/runtime/calls/signatures.h"

namespace jax_ep {

struct OwnedBuffer {
  ElementType type;
  std::vector<int64_t> dims;
};

using List = std::vector<OwnedBuffer>;

inline std::vector<BufferView> Views(const List& buffers) {
  std::vector<BufferView> views;
  for (const OwnedBuffer& buffer : buffers) views.push_back({buffer.type, buffer.dims});
  return views;
}

inline List operator+(List left, const List& right) {
  left.insert(left.end(), right.begin(), right.end());
  return left;
}

template <typename Check, typename Config, typename Sizes>
Status Run(const Check& check, const Config& config, const List& operands, const List& results,
           Sizes* sizes) {
  return check(config, Views(operands), Views(results), sizes);
}

}  // namespace jax_ep

#endif  // JAX_EP_TESTS_CPP_UNIT_CALLS_SIGNATURE_BUFFERS_H_
