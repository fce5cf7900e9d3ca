// The state that all grouped matmuls share, and a check of their accumulators.
#ifndef JAX_EP_HANDLERS_MATMUL_MATMUL_H_
#define JAX_EP_HANDLERS_MATMUL_MATMUL_H_

#include <utility>

#include "ffi/handlers/local.h"
#include "ffi/runtime/calls/tile_counter.h"

namespace jax_ep {

// The state of a call site, as TransferState. `kStateName` is a character array of its operation.
template <typename CallConfig, const char* kStateName>
struct MatmulState {
  using Config = CallConfig;
  static constexpr const char* kName = kStateName;
  inline static ffi::TypeId id = {};

  MatmulState(const char* target, Config config) : target(target), config(std::move(config)) {}

  const char* target;
  Config config;
  // One counter is enough: a device runs a call site's launches one after another.
  const TileCounter tile_counter;
};

// A kernel adds to the accumulator where it is.
inline Status CheckInPlace(const char* target, const void* accumulator, const void* result) {
  if (accumulator == result) return {};
  return InvalidArgument(target, ": the accumulator and the result are two ",
                         "buffers; expected output_operand_aliases that make them one");
}

}  // namespace jax_ep

#endif  // JAX_EP_HANDLERS_MATMUL_MATMUL_H_
