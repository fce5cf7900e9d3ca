// Expands MXFP4 weights from shared memory to the registers from which wgmma reads them (sm_90).
#ifndef JAX_EP_DEVICE_MATMUL_SM90_MAINLOOP_MXFP4_WEIGHTS_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_MAINLOOP_MXFP4_WEIGHTS_CUH_

#include "ffi/device/matmul/sm90/mainloop/mxfp4_scales.cuh"
#include "ffi/device/matmul/sm90/mxfp4_shapes.h"
#include "ffi/device/ptx/math.cuh"
#include "ffi/device/ptx/shared_memory.cuh"
#include "ffi/device/ptx/wgmma_registers.cuh"

namespace jax_ep::sm90 {

// Where a lane's first column lies in a stage; the second is 8 lines behind. In a narrow tile a
// line has its 16-byte vectors swizzled.
template <bool kIsNarrow>
class MxFp4Lines {
 public:
  static constexpr int kLineBytes = kIsNarrow ? kSwizzleBytes : kMxFp4LineBytes;
  static constexpr int kSecond = 8 * kLineBytes;

  // `warp`: of the consumers.
  __device__ explicit MxFp4Lines(int warp) {
    const int line = warp % kWarpgroupWarps * kWarpM + threadIdx.x % 32 / 4;
    first_ = kMxFp4WeightsAt +
             warp / kWarpgroupWarps * (kIsNarrow ? kMxFp4NarrowBoxBytes : kMxFp4BoxBytes) +
             line * kLineBytes + (kIsNarrow ? line % 8 * 16 : 0);
  }

  // Returns the place of a vector of 32 weights.
  __device__ uint32_t At(uint32_t stage, uint32_t vector) const {
    return kIsNarrow ? stage + first_ ^ vector * 16 : stage + first_ + vector * 16;
  }

 private:
  uint32_t first_;
};

// Expands the weights of a k-block: all four lanes of a quad read the same words, of which each
// takes one byte, two weights that are neighbors along k. `k_block`: in a group of four, kIsOdd.
template <bool kIsOdd, bool kIsNarrow>
__device__ inline void ExpandKBlock(const MxFp4Lines<kIsNarrow>& lines,
                                    const MxFp4WarpScales& scales, uint32_t stage, int k_block,
                                    uint32_t (&a)[kWgmmaRegisters]) {
  const uint32_t selector = 0x4440 | threadIdx.x % 4;
  const uint32_t exponents[] = {scales.Exponents(0, k_block / 2), scales.Exponents(1, k_block / 2)};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t at = lines.At(stage, (kIsNarrow ? k_block * 2 : 0) + half);
    const uint4 vectors[] = {LoadShared(at), LoadShared(at + MxFp4Lines<kIsNarrow>::kSecond)};
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const uint32_t factor =
          MxFp4Factor(__byte_perm(exponents[column], 0, 0x4440 | (kIsOdd * 2 + half)));
      const uint4& vector = vectors[column];
      const uint32_t words[] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t byte = __byte_perm(words[i], 0, selector);
        a[8 * half + 2 * i + column] = MultiplyBFloat16Pairs(ExpandMxFp4(byte), factor);
      }
    }
  }
  if (!scales.HasLarge()) return;
#pragma unroll
  for (int i = 0; i < kWgmmaRegisters; ++i) {
    const uint32_t factor = scales.HighFactor(i % 2, k_block / 2, kIsOdd * 2 + i / 8);
    a[i] = MultiplyBFloat16Pairs(a[i], factor);
  }
}

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_MAINLOOP_MXFP4_WEIGHTS_CUH_
