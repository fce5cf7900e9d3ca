// Basics of code that the host compiler, nvcc and NVRTC all compile: fixed-size integers, the
// JAX_EP_HOST_DEVICE specifier, and constexpr arithmetic.
#ifndef JAX_EP_DEVICE_COMMON_INTEGERS_H_
#define JAX_EP_DEVICE_COMMON_INTEGERS_H_

#ifdef __CUDACC_RTC__  // NVRTC has no standard headers
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

// Divides non-negative integers and rounds up. The result has the wider type.
template <typename Value, typename Other>
JAX_EP_HOST_DEVICE constexpr auto CeilDivide(Value value, Other divisor) {
  return (value + divisor - 1) / divisor;
}

// Minimum and maximum of two integers, both signed or both unsigned. The result has the wider type.
template <typename First, typename Second>
JAX_EP_HOST_DEVICE constexpr auto Min(First first, Second second) {
  return second < first ? second : first;
}
template <typename First, typename Second>
JAX_EP_HOST_DEVICE constexpr auto Max(First first, Second second) {
  return first < second ? second : first;
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_COMMON_INTEGERS_H_
