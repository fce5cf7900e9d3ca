// The kernels that are compiled with JAX_EP_NVSHMEM, linked with NVSHMEM's device functions, as
// data.
#ifndef JAX_EP_KERNELS_NVSHMEM_CUBIN_H_
#define JAX_EP_KERNELS_NVSHMEM_CUBIN_H_

namespace jax_ep {

// Null in builds without NVSHMEM's headers.
const void* NvshmemCubin();

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_NVSHMEM_CUBIN_H_
