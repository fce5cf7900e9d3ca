// The tile counters of the matmul kernels for sm_90a, one for each compiled call.
#ifndef JAX_EP_RUNTIME_CALLS_TILE_COUNTER_H_
#define JAX_EP_RUNTIME_CALLS_TILE_COUNTER_H_

#include <cstdint>

#include "ffi/device/common/limits.h"

namespace jax_ep {

// Holds a number for MatmulParams::tile_counter until the end of its life. Launches that may run at
// the same time on a device need different ones. Thread-safe.
class TileCounter {
 public:
  TileCounter();
  ~TileCounter();
  TileCounter(const TileCounter&) = delete;
  TileCounter& operator=(const TileCounter&) = delete;

  // -1 if all numbers were in use: launches are then slower, with the same results.
  int32_t number() const { return number_; }

 private:
  const int32_t number_;
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_CALLS_TILE_COUNTER_H_
