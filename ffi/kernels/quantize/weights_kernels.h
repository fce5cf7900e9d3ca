// The kernels that quantize matrices, by type.
#ifndef JAX_EP_KERNELS_QUANTIZE_WEIGHTS_KERNELS_H_
#define JAX_EP_KERNELS_QUANTIZE_WEIGHTS_KERNELS_H_

#include "ffi/runtime/calls/buffers.h"

namespace jax_ep {

// `type` is that of the matrices: kBF16, kF16 or kF32. With `is_aligned` every vector of x and of
// each layout is whole and aligned.
const void* QuantizeWeightsKernelAddress(ElementType type, bool is_aligned);

// Threads per block.
int QuantizeWeightsThreads(ElementType type);

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_QUANTIZE_WEIGHTS_KERNELS_H_
