// Grouped matmuls of 16-bit elements on sm_90a: one warp copies tiles by the copy engine, eight
// warps multiply them, four at a time in one instruction. Two blocks, a cluster, take two tiles
// that share an operand, which is then read once.
#include "ffi/device/matmul/sm90/epilogue_activation.cuh"
#include "ffi/device/matmul/sm90/epilogue_activation_gradient.cuh"
#include "ffi/device/matmul/sm90/epilogue_store.cuh"
#include "ffi/device/matmul/sm90/operand_loads.cuh"
#include "ffi/device/matmul/sm90/producer.cuh"
#include "ffi/device/matmul/sm90/scheduler.cuh"
#include "ffi/device/matmul/sm90/tensor_map.h"
#include "ffi/device/ptx/cluster.cuh"
#include "ffi/device/ptx/mbarrier.cuh"
#include "ffi/device/ptx/shared_memory.cuh"
#include "ffi/device/ptx/tma.cuh"
#include "ffi/device/ptx/wgmma.cuh"
#include "ffi/kernels/matmul/kernels.h"

namespace jax_ep {
namespace sm90 {

inline constexpr int kThreads = (1 + kConsumerWarpgroups) * kWarpgroupThreads;
inline constexpr int kConsumerWarps = kConsumerWarpgroups * kWarpgroupThreads / 32;
static_assert(kTileN == kResultN);

// A block has what its threads are launched with, in multiples of 8; those that copy leave most of
// theirs to those that multiply. Whoever asks for more waits for ever.
inline constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
inline constexpr int kProducerRegisters = 56;
inline constexpr int kConsumerRegisters = 224;
static_assert((kProducerRegisters + kConsumerWarpgroups * kConsumerRegisters) * kWarpgroupThreads <=
              kThreads * kLaunchRegisters);

using Ring = Pipeline<kLeftBytes + kRightBytes, 4, kConsumerWarps * kEpilogueBytes, kConsumerWarps>;

// Rows that an instruction contracts.
inline constexpr int kInstructionK = 16;

// num_k: the rows of a gradient's step, of which the last may have fewer than a stage. What is past
// them there is zeros.
template <typename T, MatmulKind kKind>
__device__ void MultiplyStep(float (&sums)[128], uint32_t stage, int consumer, bool add,
                             int num_k) {
  constexpr MajorMode kLeft = kIsRhsGradient<kKind> ? MajorMode::kMajorMN : MajorMode::kMajorK;
  constexpr MajorMode kRight = kIsTransposed<kKind> ? MajorMode::kMajorK : MajorMode::kMajorMN;
  // From one kInstructionK to the next: 16 elements of a line, or 16 lines.
  constexpr int kLeftStep = kLeft == MajorMode::kMajorK ? 32 : 2048;
  constexpr int kRightStep = kRight == MajorMode::kMajorK ? 32 : 2048;
  const uint32_t left = SharedMemoryDescriptor(stage + consumer * kLeftHalfBytes, kBlockBytes);
  const uint32_t right = SharedMemoryDescriptor(stage + kLeftBytes, kBlockBytes);
  const auto multiply = [&](int i) {
    Wgmma<T, kLeft, kRight>(sums, left + i * (kLeftStep >> 4), right + i * (kRightStep >> 4),
                            add || i > 0);
  };
  if (!kIsRhsGradient<kKind> || num_k >= kTileK) {
    WgmmaFence();
#pragma unroll
    for (int i = 0; i < kTileK / kInstructionK; ++i) multiply(i);
    WgmmaCommitGroup();
  } else {
    // A batch for each: one that both branches ended in would be merged after them, and the wait
    // for all batches but one then be a wait for all.
#pragma unroll 1
    for (int i = 0; i < CeilDivide(num_k, kInstructionK); ++i) {
      WgmmaFence();
      multiply(i);
      WgmmaCommitGroup();
    }
  }
}

// What takes a tile's sums at its end, and goes on between the steps of the next: once a stage has
// been handed back, or the copies for it would have to wait, too.
template <typename T, MatmulKind kKind>
struct Epilogue {
  StoreEpilogue rows;

  __device__ Epilogue(const MatmulProblem& /*problem*/, const MatmulTensorMaps& maps,
                      uint32_t staging)
      : rows(&maps.out, staging) {}

  __device__ void Store(const MatmulProblem& problem, const EpilogueCoordinates& place,
                        const float (&sums)[128]) {
    const TmaCoordinates at =
        kIsRhsGradient<kKind> ? TmaCoordinates{place.n, place.m, 0, place.group} : BoxOfRows(place);
    if (problem.out_is_float32) {
      rows.StoreFloat32(at, sums);
    } else {
      rows.StoreRounded<T>(at, sums);
    }
  }

  __device__ void BeforeStep() const {}

  // The second step waits for the copies of the first.
  __device__ void BetweenSteps(int k) {
    if (k == kTileK || k == Ring::kStages * kTileK) rows.Continue();
  }
};

template <typename Rows>
struct FusedEpilogue {
  Rows rows;

  __device__ FusedEpilogue(const MatmulProblem& problem, const MatmulTensorMaps& maps,
                           uint32_t staging)
      : rows(problem, maps, staging) {}

  __device__ void Store(const MatmulProblem& /*problem*/, const EpilogueCoordinates& place,
                        float (&sums)[128]) {
    rows.Store(place, sums);
  }

  __device__ void BeforeStep() { rows.Load(); }
  __device__ void BetweenSteps(int /*k*/) { rows.Continue(); }
};

template <typename T>
struct Epilogue<T, MatmulKind::kActivation> : FusedEpilogue<ActivationEpilogue<T>> {
  using FusedEpilogue<ActivationEpilogue<T>>::FusedEpilogue;
};

template <typename T>
struct Epilogue<T, MatmulKind::kActivationGradient> : FusedEpilogue<ActivationGradientEpilogue<T>> {
  using FusedEpilogue<ActivationGradientEpilogue<T>>::FusedEpilogue;
};

template <typename T, MatmulKind kKind>
__device__ void Consume(const MatmulTensorMaps& maps, const MatmulProblem& problem,
                        const Ring& ring) {
  const int warp =
      WarpUniform(threadIdx.x / 32) - kWarpgroupThreads / 32;  // of those that multiply
  const int consumer = warp / (kWarpgroupThreads / 32);
  Epilogue<T, kKind> sink(problem, maps, ring.Staging() + warp * kEpilogueBytes);
  // A lane for each block hands stages back there.
  const int lane = threadIdx.x % 32;
  const uint32_t empty = MapToBlock(ring.Empty(0), lane % kClusterBlocks);
  const auto hand_back = [&](int stage) {
    if (lane < kClusterBlocks) MbarrierArriveRemote(empty + stage * Ring::kBarrierBytes);
  };
  TileReader<Ring> tiles(ring);
  Position<Ring::kStages> at;
  bool is_full = false;
  float sums[128];
  for (Tile tile = tiles.Next(), next; tile.num_k > 0; tile = next) {
    // Rows past the end of the group are only padding: often this half has no others.
    const bool has_rows = consumer * kWarpgroupM < tile.num_m;
    int before = -1;
    for (int k = 0; k < tile.num_k; k += kTileK) {
      const uint32_t stage = ring.Stage(at.index);
      if (has_rows) sink.BeforeStep();
      if (!is_full) MbarrierWait(ring.Full(at.index), at.parity);
      const int num_k = tile.num_k - k;
      const int current = at.index;
      at.Advance();
      if (has_rows) {
        MultiplyStep<T, kKind>(sums, stage, consumer, k > 0, num_k);
        is_full = IsComplete(ring.Full(at.index), at.parity);
        WgmmaWaitGroup<1>();
      } else {
        is_full = false;
      }
      // The batch before this one has read its stage.
      __syncwarp();
      if (before >= 0) hand_back(before);
      // The batch that was begun last keeps the matrix units at work.
      if (has_rows) sink.BetweenSteps(k);
      before = current;
    }
    if (has_rows) sink.rows.Finish();
    next = tiles.Next();
    WgmmaWaitGroup<0>();
    FenceAccumulators(sums);
    __syncwarp();
    hand_back(before);
    if (!has_rows) continue;
    const int m = warp * kResultM;
    const EpilogueCoordinates place = {
        .group = tile.group, .m = tile.m + m, .n = tile.n, .num_m = tile.num_m - m};
    sink.Store(problem, place, sums);
    FenceAccumulators(sums);
  }
  sink.rows.Finish();
  sink.rows.Close();
}

template <typename T, MatmulKind kKind>
__global__ void __launch_bounds__(kThreads, 1)
    Sm90Kernel(const __grid_constant__ MatmulTensorMaps maps,
               const __grid_constant__ MatmulProblem problem) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const Ring ring(SharedAddress(DynamicSharedMemory()));
  if (threadIdx.x == 0) {
    PrefetchTensorMap(&maps.left);
    PrefetchTensorMap(&maps.right);
    PrefetchTensorMap(&maps.out);
    ring.Initialize();
  }
  __syncwarp();
  ClusterBarrier();
  if (threadIdx.x < kWarpgroupThreads) {
    WarpgroupRegisterDealloc<kProducerRegisters>();
    const int warp = WarpUniform(threadIdx.x / 32);
    const int rank = WarpUniform(ClusterRank());
    if (warp == 0) {
      const int up_n = problem.epilogue.activation.is_gated ? problem.num_n : 0;
      Produce<kTileK>(ring, Source<kKind>{maps, rank, up_n, problem.right_blocks});
    } else if (warp == 1 && rank == 0) {
      Schedule<Pairs<kKind, kTileM, kTileK>>(problem, ring);
    }
  } else {
    WarpgroupRegisterAlloc<kConsumerRegisters>();
    Consume<T, kKind>(maps, problem, ring);
  }
  __syncwarp();
  ClusterBarrier();
#else
  __trap();  // a build for compute capability 9.0 has to be one for sm_90a
#endif
}

#define JAX_EP_INSTANTIATE(TYPE, KIND)                         \
  template __global__ void Sm90Kernel<TYPE, MatmulKind::KIND>( \
      const __grid_constant__ MatmulTensorMaps, const __grid_constant__ MatmulProblem);
JAX_EP_INSTANTIATE(BFloat16, kForward)
JAX_EP_INSTANTIATE(BFloat16, kForwardTransposed)
JAX_EP_INSTANTIATE(BFloat16, kRhsGradient)
JAX_EP_INSTANTIATE(BFloat16, kActivation)
JAX_EP_INSTANTIATE(BFloat16, kActivationGradient)
JAX_EP_INSTANTIATE(Float16, kForward)
JAX_EP_INSTANTIATE(Float16, kForwardTransposed)
JAX_EP_INSTANTIATE(Float16, kRhsGradient)
JAX_EP_INSTANTIATE(Float16, kActivation)
JAX_EP_INSTANTIATE(Float16, kActivationGradient)
#undef JAX_EP_INSTANTIATE

}  // namespace sm90
}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // a compile check of the device code alone stops here

namespace jax_ep {
using namespace sm90;
namespace {

template <typename T>
const void* Address(MatmulKind kind) {
  switch (kind) {
    case MatmulKind::kForward:
      return reinterpret_cast<const void*>(Sm90Kernel<T, MatmulKind::kForward>);
    case MatmulKind::kForwardTransposed:
      return reinterpret_cast<const void*>(Sm90Kernel<T, MatmulKind::kForwardTransposed>);
    case MatmulKind::kRhsGradient:
      return reinterpret_cast<const void*>(Sm90Kernel<T, MatmulKind::kRhsGradient>);
    case MatmulKind::kActivation:
      return reinterpret_cast<const void*>(Sm90Kernel<T, MatmulKind::kActivation>);
    case MatmulKind::kActivationGradient:
      return reinterpret_cast<const void*>(Sm90Kernel<T, MatmulKind::kActivationGradient>);
  }
  return nullptr;
}

}  // namespace

static_assert(kSm90LinesOfOut == kResultM && kColumnsPerBlock == kLine);
static_assert(kNumSm90TileCounters == kNumTileCounters);

MatmulKernel Sm90MatmulKernel(bool is_bfloat16, MatmulKind kind) {
  return {.address = is_bfloat16 ? Address<BFloat16>(kind) : Address<Float16>(kind),
          .threads = kThreads,
          .cluster_blocks = kClusterBlocks,
          .shared_bytes = Ring::kSharedBytes,
          .tile_m = kTileM,
          .tile_n = kTileN,
          .left_lines = kind == MatmulKind::kRhsGradient ? kTileK : kWarpgroupM,
          .right_lines = IsTransposed(kind) ? kRightHalfN : kTileK,
          .right_blocks = IsTransposed(kind) ? 1 : kRightHalfN / kLine};
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
