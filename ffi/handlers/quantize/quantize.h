// The state of a call site that quantizes, and the attributes that all of them have.
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

// Reads how scales follow from magnitudes.
template <typename Config>
void ReadScaleOptions(AttributeReader& reader, Config* config) {
  reader.Read("min_amax", &config->min_amax);
  reader.Read("power_of_two_scales", &config->power_of_two_scales);
}

}  // namespace jax_ep

#endif  // JAX_EP_HANDLERS_QUANTIZE_QUANTIZE_H_
