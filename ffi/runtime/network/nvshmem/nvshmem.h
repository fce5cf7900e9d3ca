// The network by NVSHMEM: kernels put by themselves.
#ifndef JAX_EP_RUNTIME_NETWORK_NVSHMEM_NVSHMEM_H_
#define JAX_EP_RUNTIME_NETWORK_NVSHMEM_NVSHMEM_H_

#include <string>

#include "ffi/runtime/status.h"

namespace jax_ep {

// Joins NVLink domains by NVSHMEM from now on; empty: the system's. Call it before there are
// groups. In builds with CUDA it checks that the library and the kernels are there.
Status UseNvshmem(const std::string& folder);

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_NETWORK_NVSHMEM_NVSHMEM_H_
