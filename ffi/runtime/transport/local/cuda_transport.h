// The parts of CudaTransport. Only in builds with CUDA.
#ifndef JAX_EP_RUNTIME_TRANSPORT_LOCAL_CUDA_TRANSPORT_H_
#define JAX_EP_RUNTIME_TRANSPORT_LOCAL_CUDA_TRANSPORT_H_

#include "ffi/runtime/transport/transport.h"

namespace jax_ep {

Exchange* CudaExchange();
PeerMemory* CudaDriverMemory();
PeerMemory* CudaIpcMemory();

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_TRANSPORT_LOCAL_CUDA_TRANSPORT_H_
