// The state of a call site that quantizes rows, or matrices.
#ifndef JAX_EP_HANDLERS_QUANTIZE_QUANTIZE_H_
#define JAX_EP_HANDLERS_QUANTIZE_QUANTIZE_H_

#include "ffi/handlers/local.h"

namespace jax_ep {

template <typename CallConfig, const char* kStateName>
struct StateOfQuantizing {
  using Config = CallConfig;
  static constexpr const char* kName = kStateName;
  inline static ffi::TypeId id = {};

  StateOfQuantizing(const char* target, Config config) : target(target), config(config) {}

  const char* target;
  Config config;
};

}  // namespace jax_ep

#endif  // JAX_EP_HANDLERS_QUANTIZE_QUANTIZE_H_
