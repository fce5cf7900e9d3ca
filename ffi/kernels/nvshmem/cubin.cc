#include "ffi/kernels/nvshmem/cubin.h"

#ifdef JAX_EP_NVSHMEM_CUBIN  // its path
asm(".pushsection .rodata\n"
    ".balign 64\n"
    ".hidden jax_ep_nvshmem_cubin\n"
    ".globl jax_ep_nvshmem_cubin\n"
    "jax_ep_nvshmem_cubin:\n"
    ".incbin \"" JAX_EP_NVSHMEM_CUBIN
    "\"\n"
    ".popsection\n");
extern "C" const char jax_ep_nvshmem_cubin[];
#endif

namespace jax_ep {

const void* NvshmemCubin() {
#ifdef JAX_EP_NVSHMEM_CUBIN
  return jax_ep_nvshmem_cubin;
#else
  return nullptr;
#endif
}

}  // namespace jax_ep
