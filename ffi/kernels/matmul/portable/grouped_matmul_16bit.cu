// Grouped matmul of 16-bit operands with mma.sync, for sm_80 and newer.
//
// A persistent kernel: each block computes every gridDim.x-th tile of 128 x 256 with 8 warps, 2 x 4
// of 64 x 64 each. Per tile:
//
//   1. All threads fill a ring of kStages stages in shared memory with cp.async or, for unaligned
//      or float32 operands, through registers. A stage holds one k-block of a and b.
//   2. Each warp loads fragments with ldmatrix, ahead of the mma.sync instructions that use them.
//   3. The epilogue stores the accumulators from registers to global memory.
//
// A warp's tile is as large as registers allow. Each 16 of k take 4 KB of shared memory reads,
// which limit the kernel, so fewer bytes per multiply-add are better. One block fits on an SM; the
// number of blocks is then the number of SMs in use.
#include "ffi/device/matmul/portable/mma_epilogue.cuh"
#include "ffi/device/matmul/portable/mma_tile.cuh"
#include "ffi/device/matmul/portable/tile_scheduler.cuh"
#include "ffi/device/ptx/cp_async.cuh"
#include "ffi/device/ptx/shared_memory.cuh"
#include "ffi/kernels/matmul/portable/kernels.h"

namespace jax_ep::portable {
template <typename T, MatmulKind kKind, bool kUseCpAsync>
__global__ void __launch_bounds__(kThreads, 1)
    GroupedMatmul16BitKernel(const __grid_constant__ MatmulParams params) {
  using Stage = Stage<kKind>;
  const uint32_t stages = SharedAddress(DynamicSharedMemory());
  const int warp = threadIdx.x / 32;
  const int warp_m = warp / kWarpsN * kWarpM;
  const int warp_n = warp % kWarpsN * kWarpN;

  StaticTileScheduler<kKind, kTileM> tiles(params);
  for (Tile tile; tiles.Next(&tile);) {
    const int num_k_blocks = CeilDivide(tile.num_k, kTileK);
    // K-blocks past the end are filled with zeros: the number of commits tells which have arrived.
    const auto fill = [&](int k_block) {
      Stage::template Fill<T, kUseCpAsync>(stages + k_block % kStages * Stage::kBytes, params, tile,
                                           k_block * kTileK);
      CpAsyncCommitGroup();
    };
    // Rows past the end of the group are padding; often a warp has no others.
    const bool has_rows = warp_m < tile.num_m;

    Accumulators accumulators = {};
    Fragments fragments[2];
    if (num_k_blocks > 0) {
      for (int k_block = 0; k_block < kStages - 1; ++k_block) fill(k_block);
      CpAsyncWaitGroup<kStages - 2>();
      __syncthreads();
      if (has_rows) fragments[0].Load<kKind>(stages, warp_m, warp_n, 0);
    }
    for (int k_block = 0; k_block < num_k_blocks; ++k_block) {
      // Refills the previous k-block's stage, whose last fragments every warp loaded before the
      // barrier below. Copies by cp.async are issued between the multiplications; those through
      // registers before, because they need the registers.
      if (!kUseCpAsync) fill(k_block + kStages - 1);
      uint32_t stage = stages + k_block % kStages * Stage::kBytes;
#pragma unroll
      for (int i = 0; i < kFragmentsK; ++i) {
        if (i == kFragmentsK - 1) {
          // Waits for the next k-block; the barrier covers what other threads copied.
          CpAsyncWaitGroup<kStages - 2>();
          __syncthreads();
          stage = stages + (k_block + 1) % kStages * Stage::kBytes;
        }
        const bool fills = kUseCpAsync && i == 0;
        if (has_rows) {
          fragments[(i + 1) % 2].Load<kKind>(stage, warp_m, warp_n,
                                             (i + 1) % kFragmentsK * kFragment);
          if (fills) fill(k_block + kStages - 1);
          MultiplyAccumulate<T>(fragments[i % 2], accumulators);
        } else if (fills) {
          fill(k_block + kStages - 1);
        }
      }
    }
    // Waits until all warps have read the stages and the copies of zeros are complete, because the
    // next tile refills them.
    CpAsyncWaitGroup<0>();
    __syncthreads();
    if constexpr (kIsActivation<kKind>) {
      ActivationEpilogue<T>(params, tile, warp_m, warp_n, accumulators);
    } else {
      StoreEpilogue<T, kKind>(params, tile, warp_m, warp_n, accumulators);
    }
  }
}

#define JAX_EP_INSTANTIATE(TYPE, KIND)                                              \
  template __global__ void GroupedMatmul16BitKernel<TYPE, MatmulKind::KIND, false>( \
      const __grid_constant__ MatmulParams);                                        \
  template __global__ void GroupedMatmul16BitKernel<TYPE, MatmulKind::KIND, true>(  \
      const __grid_constant__ MatmulParams);
JAX_EP_INSTANTIATE(BFloat16, kForward)
JAX_EP_INSTANTIATE(BFloat16, kForwardTransposed)
JAX_EP_INSTANTIATE(BFloat16, kRhsGradient)
JAX_EP_INSTANTIATE(BFloat16, kActivation)
JAX_EP_INSTANTIATE(Float16, kForward)
JAX_EP_INSTANTIATE(Float16, kForwardTransposed)
JAX_EP_INSTANTIATE(Float16, kRhsGradient)
JAX_EP_INSTANTIATE(Float16, kActivation)
#undef JAX_EP_INSTANTIATE

}  // namespace jax_ep::portable

#ifndef __CUDACC_RTC__  // NVRTC compiles the device code only

namespace jax_ep {
namespace portable {
namespace {

template <typename T, MatmulKind kKind>
MatmulKernel Describe(bool use_cp_async) {
  const auto kernel = use_cp_async ? GroupedMatmul16BitKernel<T, kKind, true>
                                   : GroupedMatmul16BitKernel<T, kKind, false>;
  return {.address = reinterpret_cast<const void*>(kernel),
          .threads = kThreads,
          .shared_bytes = Stage<kKind>::kSharedBytes,
          .tile_m = kTileM,
          .tile_n = kTileN,
          .store_elements = 2};
}

template <typename T>
MatmulKernel Describe(MatmulKind kind, bool use_cp_async) {
  switch (kind) {
    case MatmulKind::kForward:
      return Describe<T, MatmulKind::kForward>(use_cp_async);
    case MatmulKind::kForwardTransposed:
      return Describe<T, MatmulKind::kForwardTransposed>(use_cp_async);
    case MatmulKind::kRhsGradient:
      return Describe<T, MatmulKind::kRhsGradient>(use_cp_async);
    case MatmulKind::kActivation:
      return Describe<T, MatmulKind::kActivation>(use_cp_async);
    case MatmulKind::kActivationGradient:
      break;  // kForwardTransposed, then ActivationGradientKernel
  }
  return {};
}

}  // namespace
}  // namespace portable

MatmulKernel Portable16BitMatmulKernel(bool is_bfloat16, MatmulKind kind, bool use_cp_async) {
  return is_bfloat16 ? portable::Describe<BFloat16>(kind, use_cp_async)
                     : portable::Describe<Float16>(kind, use_cp_async);
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
