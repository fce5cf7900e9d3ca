// The only source that includes NVSHMEM: its functions as rail_network.cuh needs them. It is linked
// with the kernels that are compiled with JAX_EP_NVSHMEM into a cubin (cmake/Nvshmem.cmake).
#include <nvshmem.h>
#include <nvshmemx.h>

#include "ffi/runtime/network/nvshmem/put_params.h"

namespace jax_ep {

__device__ void NvshmemPut(void* to, const void* from, uint64_t bytes, uint64_t* flag,
                           uint64_t value, int pe) {
  nvshmem_putmem_signal_nbi(to, from, bytes, flag, value, NVSHMEM_SIGNAL_SET, pe);
}

__device__ void NvshmemSet(uint64_t* flag, uint64_t value, int pe) {
  nvshmemx_signal_op(flag, value, NVSHMEM_SIGNAL_SET, pe);
}

// Puts for the host, in one thread, and waits until all that this rank has put has arrived.
extern "C" __global__ void jax_ep_nvshmem_put(const __grid_constant__ NvshmemPutParams params) {
  auto* const flag = reinterpret_cast<uint64_t*>(params.flag);
  __threadfence_system();
  if (params.bytes > 0) {
    NvshmemPut(reinterpret_cast<void*>(params.to), reinterpret_cast<const void*>(params.from),
               params.bytes, flag, params.value, params.pe);
  } else if (flag != nullptr) {
    NvshmemSet(flag, params.value, params.pe);
  }
  nvshmem_quiet();
}

}  // namespace jax_ep
