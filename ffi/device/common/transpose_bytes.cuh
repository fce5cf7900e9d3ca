// Transposes small matrices of bytes in registers.
#ifndef JAX_EP_DEVICE_COMMON_TRANSPOSE_BYTES_CUH_
#define JAX_EP_DEVICE_COMMON_TRANSPOSE_BYTES_CUH_

#include "ffi/device/common/integers.h"

namespace jax_ep {

// Transposes 4 x 4 bytes. A word is a row, its lowest byte the first column.
__device__ inline void TransposeBytes(uint32_t (&rows)[4]) {
  const uint32_t first_low = __byte_perm(rows[0], rows[1], 0x5140);
  const uint32_t first_high = __byte_perm(rows[0], rows[1], 0x7362);
  const uint32_t last_low = __byte_perm(rows[2], rows[3], 0x5140);
  const uint32_t last_high = __byte_perm(rows[2], rows[3], 0x7362);
  rows[0] = __byte_perm(first_low, last_low, 0x5410);
  rows[1] = __byte_perm(first_low, last_low, 0x7632);
  rows[2] = __byte_perm(first_high, last_high, 0x5410);
  rows[3] = __byte_perm(first_high, last_high, 0x7632);
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_COMMON_TRANSPOSE_BYTES_CUH_
