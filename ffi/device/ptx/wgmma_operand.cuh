// Operand tiles of wgmma in shared memory (sm_90a). For the emulator, too.
#ifndef JAX_EP_DEVICE_PTX_WGMMA_OPERAND_CUH_
#define JAX_EP_DEVICE_PTX_WGMMA_OPERAND_CUH_

#include "ffi/device/common/integers.h"

namespace jax_ep {

// The layout of an operand tile in shared memory. Both layouts have lines of 64 elements (128
// bytes) with the 128-byte swizzle of tensor maps, and atoms of 8 lines aligned to 1024 bytes.
enum class MajorMode {
  kMajorK,  // a line is 64 elements along k; lines follow each other along m or n
  kMajorMN  // a line is 64 elements along m or n; lines follow along k, then blocks of 64 m or n
};

// Returns the lower word of a tile's matrix descriptor: its address and, for kMajorMN, the distance
// between blocks of 64 elements of m or n, both in units of 16 bytes. The upper word is constant.
__device__ inline uint32_t SharedMemoryDescriptor(uint32_t address, uint32_t block_bytes) {
  return block_bytes >> 4 << 16 | (address & 0x3ffff) >> 4;
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_WGMMA_OPERAND_CUH_
