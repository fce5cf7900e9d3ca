// Filling arrays with a value.
#ifndef JAX_EP_DEVICE_TRANSFER_FILL_CUH_
#define JAX_EP_DEVICE_TRANSFER_FILL_CUH_

#include "ffi/device/protocol/role_context.cuh"

namespace jax_ep {

template <typename T>
__device__ inline void Fill(const ThreadGroup& threads, T* begin, int64_t count, T value) {
  for (int64_t i = threads.index; i < count; i += threads.size) begin[i] = value;
}

__device__ inline float Nan() { return __int_as_float(0x7fc00000); }

__device__ inline uint4 RepeatWord(uint32_t word) { return make_uint4(word, word, word, word); }

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_FILL_CUH_
