// Division by a divisor that is known at launch: three instructions instead of two dozen, whose
// fetch would add to the latency of a low-latency kernel.
#ifndef JAX_EP_DEVICE_COMMON_FAST_DIVMOD_H_
#define JAX_EP_DEVICE_COMMON_FAST_DIVMOD_H_

#include "ffi/device/common/integers.h"

namespace jax_ep {

// Divides 0 to 2^31 - 1 by 1 to 2^31 - 1. T. Granlund, P. Montgomery: "Division by Invariant
// Integers using Multiplication", PLDI 1994, figure 4.1.
class FastDivmod {
 public:
  FastDivmod() = default;
  JAX_EP_HOST_DEVICE explicit FastDivmod(int32_t divisor) : divisor_(divisor) {
    while (uint64_t{1} << shift_ < static_cast<uint64_t>(divisor)) ++shift_;
    const uint64_t excess = (uint64_t{1} << shift_) - static_cast<uint64_t>(divisor);
    multiplier_ = static_cast<uint32_t>((excess << 32) / static_cast<uint64_t>(divisor) + 1);
  }

  JAX_EP_HOST_DEVICE int32_t divisor() const { return divisor_; }
  JAX_EP_HOST_DEVICE int32_t Quotient(int32_t value) const {
    const auto number = static_cast<uint32_t>(value);
    const auto high = static_cast<uint32_t>(uint64_t{number} * multiplier_ >> 32);
    return static_cast<int32_t>((high + number) >> shift_);
  }
  JAX_EP_HOST_DEVICE int32_t Remainder(int32_t value) const {
    return value - Quotient(value) * divisor_;
  }

 private:
  int32_t divisor_ = 1;
  uint32_t multiplier_ = 1;
  uint32_t shift_ = 0;
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_COMMON_FAST_DIVMOD_H_
