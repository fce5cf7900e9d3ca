// Queries of the communicator that XLA lends. NCCL is not linked: JAX has loaded it.
#ifndef JAX_EP_RUNTIME_CUDA_NCCL_H_
#define JAX_EP_RUNTIME_CUDA_NCCL_H_

#include <cstdint>

#include "ffi/runtime/status.h"

namespace jax_ep {

// Finds a function of the loaded NCCL, or null.
void* FindNcclFunction(const char* name);

// Finds the caller's rank in the communicator, an ncclComm_t.
Status RankIn(void* communicator, int64_t* rank);

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_CUDA_NCCL_H_
