// What code needs that the host compiler, nvcc and NVRTC all read: fixed-size integers, a mark for
// functions that run on both sides, and division.
#ifndef JAX_EP_DEVICE_INTEGERS_H_
#define JAX_EP_DEVICE_INTEGERS_H_

#ifdef __CUDACC_RTC__  // has no standard headers
using int32_t = int;
using int64_t = long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
#else
#include <cstdint>
#endif

#ifdef __CUDACC__
#define JAX_EP_HOST_DEVICE __host__ __device__
#else
#define JAX_EP_HOST_DEVICE
#endif

namespace jax_ep {

// Rounded up. Of integers that are not negative; the result is of the wider type.
template <typename Value, typename Divisor>
JAX_EP_HOST_DEVICE constexpr auto CeilDivide(Value value, Divisor divisor) {
  return (value + divisor - 1) / divisor;
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_INTEGERS_H_
