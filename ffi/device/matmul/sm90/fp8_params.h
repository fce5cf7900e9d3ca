// Scales of the operands of the sm_90 FP8 matmul.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_FP8_PARAMS_H_
#define JAX_EP_DEVICE_MATMUL_SM90_FP8_PARAMS_H_

#include "ffi/device/common/integers.h"

namespace jax_ep {

// Values per scale along an axis that has blocks.
inline constexpr int kFp8Block = 128;

// a is [rows, k] and b [groups, n, k], of 8-bit values. In MatmulParams and in the tensor maps two
// of these are one 16-bit element, so shape_k is half of their number. A k-block is then the same
// 128 bytes as in 16-bit matmuls.
struct Fp8Scales {
  const float* a;    // [rows, k_blocks], or [rows] if there are no blocks
  const float* b;    // [groups, n_blocks, k_blocks], or [groups, n]
  int32_t k_blocks;  // ceil(k / kFp8Block)
  int32_t n_blocks;  // ceil(n / kFp8Block)
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_MATMUL_SM90_FP8_PARAMS_H_
