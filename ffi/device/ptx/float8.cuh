// Conversions to 8-bit floats.
#ifndef JAX_EP_DEVICE_PTX_FLOAT8_CUH_
#define JAX_EP_DEVICE_PTX_FLOAT8_CUH_

#include "ffi/device/common/integers.h"

namespace jax_ep {

// Returns two E4M3 values, the first in the low byte: rounded to nearest even, at most 448 in
// magnitude. NaN stays NaN.
__device__ inline uint16_t PackE4M3(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_FLOAT8_CUH_
