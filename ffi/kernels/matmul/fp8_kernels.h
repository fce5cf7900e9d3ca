// The FP8 kernels, as their launch sees them.
#ifndef JAX_EP_KERNELS_MATMUL_FP8_KERNELS_H_
#define JAX_EP_KERNELS_MATMUL_FP8_KERNELS_H_

#include "ffi/kernels/matmul/kernels.h"

namespace jax_ep {

// The formats of both operands: values of a and b, and the values that share a scale.
enum class Fp8Kind {
  kBlock128,  // E4M3 and E4M3; 1 x 128 of a, 128 x 128 of b
  kRow,       // E4M3 and E4M3; a row of a, a column of a matrix of b
  kRowE5M2    // E5M2 and E4M3, else as kRow
};

// Up to this many values along K, the ends of tiles are a large part of the time.
inline constexpr int64_t kFp8ShortK = 1024;

// Returns the kernel for sm_90a. It takes MatmulTensorMaps, MatmulParams and Fp8Scales. Both forms
// compute the same bits.
MatmulKernel Fp8MatmulKernel(Fp8Kind kind, bool is_short);

// Returns the kernel of kBlock128 with a gated activation, whose results are quantized.
MatmulKernel Fp8ActivationKernel();

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_MATMUL_FP8_KERNELS_H_
