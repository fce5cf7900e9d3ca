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
//
// In weight gradients k runs over rows, in row blocks of 128 that never span two groups. a is
// [row blocks, m, 128] and b [row blocks, n, 128]; rows that a block lacks are zeros. Group sizes
// are then those rows, multiples of 128.
struct Fp8Scales {
  const float* a;    // [rows, k_blocks], or [rows] if there are no blocks; or [row blocks, m]
  const float* b;    // [groups, n_blocks, k_blocks], or [groups, n]; or [row blocks, n_blocks]
  int32_t k_blocks;  // ceil(k / kFp8Block), or the row blocks
  int32_t n_blocks;  // ceil(n / kFp8Block)
  // Column blocks of b from one half of a tile to the other: 1, or those from gate to up.
  int32_t half_stride;
  float* out = nullptr;              // scales of the results, [rows, columns / kFp8Block]
  bool out_is_power_of_two = false;  // rounds the scales of results up to powers of two
  int32_t a_stride = 0;              // weight gradients: m, the scales of a in one row block
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_MATMUL_SM90_FP8_PARAMS_H_
