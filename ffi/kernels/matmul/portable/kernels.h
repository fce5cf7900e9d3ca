// The kernels for every GPU since sm_80, and their family.
#ifndef JAX_EP_KERNELS_MATMUL_PORTABLE_KERNELS_H_
#define JAX_EP_KERNELS_MATMUL_PORTABLE_KERNELS_H_

#include "ffi/device/matmul/params.h"
#include "ffi/kernels/matmul/kernel.h"
#ifndef __CUDACC_RTC__
#include "ffi/kernels/matmul/family.h"
#include "ffi/runtime/calls/buffers.h"

namespace jax_ep {

// Return the kernels; they have no kActivationGradient. use_cp_async is faster. It requires that
// both operands are aligned and have 16-bit elements.
MatmulKernel Portable16BitMatmulKernel(bool is_bfloat16, MatmulKind kind, bool use_cp_async);
MatmulKernel PortableFloat32MatmulKernel(MatmulKind kind);

// Returns the kernel that makes kActivationGradient of kForwardTransposed's result.
MatmulKernel PortableActivationGradientKernel(ElementType type);

// Takes every call of operands that are not quantized, on every GPU.
const MatmulFamily& PortableMatmuls();

}  // namespace jax_ep
#endif

#endif  // JAX_EP_KERNELS_MATMUL_PORTABLE_KERNELS_H_
