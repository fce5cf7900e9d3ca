// Values per scale, and how a scale follows from the largest magnitude of its values.
#ifndef JAX_EP_DEVICE_QUANTIZE_SCALE_PARAMS_H_
#define JAX_EP_DEVICE_QUANTIZE_SCALE_PARAMS_H_

#include "ffi/device/common/integers.h"

namespace jax_ep {

// Values per scale, along each axis that has blocks.
inline constexpr int kValuesPerScale = 128;

// 1 / the largest value of each type.
inline constexpr float kInverseLargestE4M3 = 1.0 / 448;
inline constexpr float kInverseLargestE5M2 = 1.0 / 57344;

struct ScaleParams {
  float min_amax;            // a block's largest magnitude is at least this
  float inverse_largest;     // 1 / the largest value
  bool power_of_two_scales;  // scales are rounded up to powers of two
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_QUANTIZE_SCALE_PARAMS_H_
