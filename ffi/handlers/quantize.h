// The state of a call site that quantizes rows, or matrices.
#ifndef JAX_EP_HANDLERS_QUANTIZE_H_
#define JAX_EP_HANDLERS_QUANTIZE_H_

#include "ffi/handlers/local.h"

namespace jax_ep {

template <typename CallConfig>
struct StateOfQuantizing {
  using Config = CallConfig;
  inline static ffi::TypeId id = {};

  StateOfQuantizing(const char* target, Config config) : target(target), config(config) {}

  const char* target;
  Config config;
};
using QuantizeState = StateOfQuantizing<QuantizeConfig>;
using QuantizeWeightsState = StateOfQuantizing<QuantizeWeightsConfig>;

}  // namespace jax_ep

#endif  // JAX_EP_HANDLERS_QUANTIZE_H_
