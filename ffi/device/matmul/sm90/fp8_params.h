// Scales of the operands of the sm_90 FP8 matmul.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_FP8_PARAMS_H_
#define JAX_EP_DEVICE_MATMUL_SM90_FP8_PARAMS_H_

#include "ffi/device/common/integers.h"

namespace jax_ep {

// Values per scale along an axis that has blocks.
inline constexpr int kFp8Block = 128;

// Blocks whose largest magnitude is less than this have its scale.
inline constexpr float kFp8MinAmax = 1e-4f;

// a is [rows, k] and b [groups, n, k], of 8-bit values. In MatmulParams and in the tensor maps two
// of these are one 16-bit element, so shape_k is half of their number. A k-block is then the same
// 128 bytes as in 16-bit matmuls.
struct Fp8Scales {
  const float* a;    // [rows, k_blocks], or [rows] if there are no blocks
  const float* b;    // [groups, n_blocks, k_blocks], or [groups, n]
  int32_t k_blocks;  // ceil(k / kFp8Block)
  int32_t n_blocks;  // ceil(n / kFp8Block)
  // Column blocks of b from one half of a tile to the other: 1, or those from gate to up.
  int32_t half_stride;
  float* out = nullptr;              // scales of the results, [rows, columns / kFp8Block]
  bool out_is_power_of_two = false;  // rounds the scales of results up to powers of two
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_MATMUL_SM90_FP8_PARAMS_H_
