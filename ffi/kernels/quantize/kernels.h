// The kernels of quantized rows, by type.
#ifndef JAX_EP_KERNELS_QUANTIZE_KERNELS_H_
#define JAX_EP_KERNELS_QUANTIZE_KERNELS_H_

#include "ffi/device/quantize/params.h"
#include "ffi/runtime/calls/buffers.h"

namespace jax_ep {

// Values and scales of the result.
enum class QuantizeKind { kBlock128, kRow, kRowE5M2 };

// Threads of a block, and vectors of the row that each holds in registers at a time.
inline constexpr int kMaxQuantizeThreads = 256;
inline constexpr int kQuantizeVectors = 4;

// `type` is that of the rows: kBF16, kF16 or kF32.
const void* QuantizeKernelAddress(ElementType type, QuantizeKind kind);

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_QUANTIZE_KERNELS_H_
