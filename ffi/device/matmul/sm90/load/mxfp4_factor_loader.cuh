// Loads the scales of MXFP4 weights, and writes them to the stages as factors of the expanded
// weights (sm_90).
#ifndef JAX_EP_DEVICE_MATMUL_SM90_LOAD_MXFP4_FACTOR_LOADER_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_LOAD_MXFP4_FACTOR_LOADER_CUH_

#include "ffi/device/matmul/params.h"
#include "ffi/device/matmul/sm90/mxfp4_lhs_gradient_shapes.h"
#include "ffi/device/matmul/sm90/pipeline.cuh"
#include "ffi/device/ptx/mbarrier.cuh"
#include "ffi/device/ptx/shared_memory.cuh"

namespace jax_ep::sm90 {

// A row of scales belongs to one k and has a byte per 32 columns: TMA cannot load four bytes of it.
// A warp of its own does, once for all consumers, and converts them. Lane l has k 2 * l and 2 * l +
// 1 of a k-block.
class MxFp4FactorLoader {
 public:
  // `scales`: E8M0 [groups, k, n / kMxFp4Block], at a multiple of 4 bytes.
  __device__ MxFp4FactorLoader(const MatmulParams& params, const Pipeline& pipeline,
                               const uint8_t* scales)
      : params_(params), pipeline_(pipeline), scales_(scales) {}

  // Called by one warp of each block.
  __device__ void Run() {
    PipelineState<kStages> state;
    TileReader tiles(pipeline_);
    for (Tile tile = tiles.Next(); tile.num_k > 0; tile = tiles.Next()) {
      Begin(tile);
      const int k_blocks = CeilDivide(tile.num_k, kTileK);
      const int per_stage = tile.shared == SharedOperand::kANarrow ? kLhsGradientNarrowKBlocks : 1;
      int in_stage = 0;
#pragma unroll
      for (int ahead = 0; ahead < kAhead; ++ahead) Load(loaded_[ahead]);
#pragma unroll 1
      for (int first = 0; first < k_blocks; first += kAhead) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int k_block = first + i;
          if (k_block >= k_blocks) break;
          if (in_stage == 0) pipeline_.ProducerAcquire(state);
          Write(loaded_[i], pipeline_.Stage(state.index) + kFactorsAt + in_stage * kFactorsBytes);
          Load(loaded_[i]);
          if (++in_stage < per_stage && k_block + 1 < k_blocks) continue;
          in_stage = 0;
          MbarrierArrive(pipeline_.FullBarrier(state.index));
          state.Advance();
        }
      }
    }
  }

 private:
  static constexpr int kAhead = 4;  // k-blocks whose scales are in flight

  // The words in which four scales of one k begin and end.
  struct Words {
    uint32_t first, second;
  };
  using KBlock = Words[2];  // k 2 * l and 2 * l + 1

  __device__ void Begin(const Tile& tile) {
    const int row_bytes = params_.shape_n / kMxFp4Block;
    const int first_block = tile.n / kMxFp4Block;
    const int bits = 8 * min(kFactorBlocks, row_bytes - first_block);
    const int k = tile.k + threadIdx.x % 32 * 2;
    left_ = bits > 0 ? params_.shape_k - k : 0;
    stride_ = row_bytes * (kTileK / 4);
    const uintptr_t address = reinterpret_cast<uintptr_t>(scales_) +
                              (int64_t{tile.group} * params_.shape_k + k) * row_bytes + first_block;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uintptr_t at = address + i * row_bytes;
      next_[i] = reinterpret_cast<const uint32_t*>(at & ~uintptr_t{3});
      shift_[i] = static_cast<uint32_t>(at % 4) * 8;
      has_second_[i] = bits + static_cast<int>(shift_[i]) > 32;
    }
  }

  // Loads the words that have scales of these columns. Past the end of k the weights are zeros, and
  // any scale but NaN is as good as another.
  __device__ void Load(KBlock& words) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      words[i].first = left_ > i ? __ldg(next_[i]) : 0;
      words[i].second = left_ > i && has_second_[i] ? __ldg(next_[i] + 1) : 0;
      next_[i] += stride_;
    }
    left_ -= kTileK;
  }

  __device__ void Write(const KBlock& words, uint32_t to) const {
    const uint32_t bits[] = {__funnelshift_r(words[0].first, words[0].second, shift_[0]),
                             __funnelshift_r(words[1].first, words[1].second, shift_[1])};
    const uint32_t is_large = IsLarge(bits[0]) | IsLarge(bits[1]);
    const bool has_large = __any_sync(0xffffffffu, is_large != 0);
    const uint32_t sign = has_large ? kTakesHighFactors : 0;
#pragma unroll
    for (int block = 0; block < kFactorBlocks; ++block) {
      const uint32_t at = to + FactorOffset(block, threadIdx.x % 32);
      const uint32_t first = bits[0] >> 8 * block & 0xff;
      const uint32_t second = bits[1] >> 8 * block & 0xff;
      const uint32_t low = MxFp4Exponent(first) << 7 | MxFp4Exponent(second) << 23;
      StoreShared(at, low | sign);
      if (!has_large) continue;
      const uint32_t high =
          (MxFp4HighFactor(first) & 0xffffu) | (MxFp4HighFactor(second) & 0xffff0000u);
      StoreShared(at + kHighFactorsAt, high | sign);
    }
  }

  // Returns whether a byte is larger than kMxFp4LargeScale.
  __device__ static uint32_t IsLarge(uint32_t bytes) {
    static_assert(kMxFp4LargeScale == 128);
    return (bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu & bytes & 0x80808080u;
  }

  const MatmulParams& params_;
  const Pipeline pipeline_;
  const uint8_t* const scales_;
  const uint32_t* next_[2] = {};
  uint32_t shift_[2] = {};
  bool has_second_[2] = {};
  int left_ = 0;    // values of k from the lane's first on
  int stride_ = 0;  // words from a k-block to the next
  KBlock loaded_[kAhead] = {};
};

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_LOAD_MXFP4_FACTOR_LOADER_CUH_
