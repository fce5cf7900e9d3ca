#include "ffi/runtime/processes/cuda_transport.h"
#include "ffi/runtime/settings.h"

namespace jax_ep {

const Transport* CudaTransport() {
  if (!SeveralProcessesAreEnabled()) return nullptr;
  static const Transport transport = {CudaExchange(), CudaPeerMemory()};
  return &transport;
}

}  // namespace jax_ep
