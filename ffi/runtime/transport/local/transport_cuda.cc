#include "ffi/runtime/settings.h"
#include "ffi/runtime/transport/local/cuda_transport.h"

namespace jax_ep {

const Transport* CudaTransport() {
  static const Transport transport = {
      CudaExchange(), OnlyIpcIsTried()
                          ? std::vector<PeerMemory*>{CudaIpcMemory()}
                          : std::vector<PeerMemory*>{CudaDriverMemory(), CudaIpcMemory()}};
  return &transport;
}

}  // namespace jax_ep
