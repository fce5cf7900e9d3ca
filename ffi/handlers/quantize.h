// The state of a call site that quantizes rows.
#ifndef JAX_EP_HANDLERS_QUANTIZE_H_
#define JAX_EP_HANDLERS_QUANTIZE_H_

#include "ffi/handlers/local.h"

namespace jax_ep {

struct QuantizeState {
  using Config = QuantizeConfig;
  inline static ffi::TypeId id = {};

  QuantizeState(const char* target, Config config) : target(target), config(config) {}

  const char* target;
  Config config;
};

}  // namespace jax_ep

#endif  // JAX_EP_HANDLERS_QUANTIZE_H_
