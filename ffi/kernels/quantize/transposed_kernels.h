// The kernels that quantize the rows of groups, transposed, by type.
#ifndef JAX_EP_KERNELS_QUANTIZE_TRANSPOSED_KERNELS_H_
#define JAX_EP_KERNELS_QUANTIZE_TRANSPOSED_KERNELS_H_

#include "ffi/runtime/calls/buffers.h"

namespace jax_ep {

// `type` is that of the rows: kBF16, kF16, kF32, or kF8E4M3 with scales. With `per_column` each
// column of a row block has a scale, otherwise 128 columns share one. With `is_aligned` every
// vector of x is whole and aligned. `with_rows` kernels quantize the rows as they are, too; there
// are none of kF8E4M3.
const void* QuantizeTransposedKernelAddress(ElementType type, bool per_column, bool is_aligned,
                                            bool with_rows);

// Threads per block.
int QuantizeTransposedThreads(ElementType type);

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_QUANTIZE_TRANSPOSED_KERNELS_H_
