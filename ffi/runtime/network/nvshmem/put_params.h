// The parameters of the kernel by which the host puts over NVSHMEM.
#ifndef JAX_EP_RUNTIME_NETWORK_NVSHMEM_PUT_PARAMS_H_
#define JAX_EP_RUNTIME_NETWORK_NVSHMEM_PUT_PARAMS_H_

#include <cstdint>

namespace jax_ep {

// Addresses of the partner's memory are symmetric (device/protocol/symmetric_rails.h).
struct NvshmemPutParams {
  uint64_t to = 0;
  uint64_t from = 0;
  uint64_t bytes = 0;  // 0: only the flag is set
  uint64_t flag = 0;   // 0: nothing is put. What kernels have put arrives in any case
  uint64_t value = 0;
  int32_t pe = 0;
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_NETWORK_NVSHMEM_PUT_PARAMS_H_
