// Loads the scales of MXFP4 weights for the warps that need them (sm_90).
#ifndef JAX_EP_DEVICE_MATMUL_SM90_MAINLOOP_MXFP4_SCALES_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_MAINLOOP_MXFP4_SCALES_CUH_

#include "ffi/device/matmul/sm90/mxfp4_shapes.h"

namespace jax_ep::sm90 {

// The scales of a warp's 16 columns, of which each lane has those of two: l / 4 and l / 4 + 8.
//
// A row of scales has no alignment, so TMA cannot load it. Lanes load words, for a group of four
// k-blocks at a time and a group ahead of its use. Of the four lanes that share two columns, each
// loads a half of one column's.
class MxFp4WarpScales {
 public:
  static constexpr int kGroupKBlocks = 4;

  __device__ explicit MxFp4WarpScales(const MxFp4Scales& scales) : scales_(scales) {}

  // Begins a tile: this lane's columns are row `first` of the stack's matrices, and the row that is
  // `distance` behind. `first_block`: where k begins, in blocks.
  __device__ void Begin(int64_t first, int distance, int first_block) {
    const int lane = threadIdx.x % 4;
    const int block = first_block + lane % 2 * kWordBlocks;
    const int64_t row = first + (lane < 2 ? 0 : distance);
    const uintptr_t address =
        reinterpret_cast<uintptr_t>(scales_.b) + row * scales_.k_blocks + block;
    next_ = reinterpret_cast<const uint32_t*>(address & ~uintptr_t{3});
    shift_ = static_cast<uint32_t>(address % 4) * 8;
    left_ = scales_.k_blocks - block;
    Load();
  }

  // Takes the scales of the next group, and loads those of the one after it.
  __device__ void Next() {
    uint32_t bits = __funnelshift_r(loaded_[0], loaded_[1], shift_);
    // Past the end of k the weights are zeros, and any scale but NaN is as good as another.
    if (left_ < kWordBlocks) bits &= left_ > 0 ? (1u << 8 * left_) - 1 : 0;
    left_ -= kGroupBlocks;
    Load();
    const uint32_t is_large = (bits & 0x7f7f7f7fu) + 0x7f7f7f7fu & bits & 0x80808080u;
    has_large_ = __any_sync(0xffffffffu, is_large != 0);
    uint32_t exponents = bits + MxFp4Exponent(0) * 0x01010101u;
    bits_ = bits;
    if (has_large_) {
      exponents = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) exponents |= MxFp4Exponent(bits >> 8 * i & 0xff) << 8 * i;
    }
    exponents_ = exponents;
  }

  // Returns the exponents of a column, 0 or 1, in a half of the group.
  __device__ uint32_t Exponents(int column, int half) const {
    return OfLane(2 * column + half, exponents_);
  }

  // Returns whether a scale of the group needs a high factor, too.
  __device__ bool HasLarge() const { return has_large_; }
  __device__ uint32_t HighFactor(int column, int half, int block) const {
    return MxFp4HighFactor(OfLane(2 * column + half, bits_) >> block * 8 & 0xff);
  }

 private:
  static constexpr int kWordBlocks = 4;
  static constexpr int kGroupBlocks = kGroupKBlocks * kTileK / kMxFp4Block;

  __device__ static uint32_t OfLane(int lane, uint32_t word) {
    return __shfl_sync(0xffffffffu, word, (threadIdx.x % 32 & ~3u) | lane);
  }

  // Loads the words that have blocks of this row.
  __device__ void Load() {
    loaded_[0] = left_ > 0 ? __ldg(next_) : 0;
    loaded_[1] = left_ * 8 + static_cast<int>(shift_) > 32 ? __ldg(next_ + 1) : 0;
    next_ += kGroupBlocks / 4;
  }

  const MxFp4Scales& scales_;
  const uint32_t* next_ = nullptr;
  uint32_t shift_ = 0;
  int left_ = 0;  // blocks of the row from the group on
  uint32_t loaded_[2] = {};
  uint32_t bits_ = 0;
  uint32_t exponents_ = 0;  // see MxFp4Factor
  bool has_large_ = false;
};

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_MAINLOOP_MXFP4_SCALES_CUH_
