// Grouped matmuls of 16-bit elements on sm_90a: one warp copies tiles by the copy engine, eight
// warps multiply them, four at a time in one instruction.
#include "ffi/device/mbarrier.cuh"
#include "ffi/device/result_rows.cuh"
#include "ffi/device/sm90_pipeline.cuh"
#include "ffi/device/tensor_map.h"
#include "ffi/device/wgmma.cuh"
#include "ffi/kernels/grouped_matmul_kernels.h"

namespace jax_ep {
namespace sm90 {

// One step along k of both operands. By one thread.
template <MatmulKind kKind>
__device__ void CopyStep(const CUtensorMap& left, const CUtensorMap& right, const Tile& tile, int k,
                         uint32_t stage, uint32_t barrier) {
  ArriveExpecting(barrier, kStageBytes);
  const uint32_t to = stage + kLeftBytes;
  if constexpr (kIsGradient<kKind>) {
    for (int i = 0; i < kTileM / kLine; ++i) {
      CopyBox(stage + i * kBlockBytes, &left, barrier, tile.m + i * kLine, tile.row + k, 0);
    }
    for (int i = 0; i < kTileN / kLine; ++i) {
      CopyBox(to + i * kBlockBytes, &right, barrier, tile.n + i * kLine, tile.row + k, 0);
    }
  } else {
    // Rows past the group's end are copied, multiplied, and not stored.
    CopyBox(stage, &left, barrier, k, tile.row, 0);
    if constexpr (kKind == MatmulKind::kForwardTransposed) {
      CopyBox(to, &right, barrier, k, tile.n, tile.group);
    } else {
      for (int i = 0; i < kTileN / kLine; ++i) {
        CopyBox(to + i * kBlockBytes, &right, barrier, tile.n + i * kLine, k, tile.group);
      }
    }
  }
}

template <MatmulKind kKind>
__device__ void Produce(const CUtensorMap& left, const CUtensorMap& right,
                        const MatmulProblem& problem, uint32_t shared) {
  const bool is_leader = threadIdx.x % 32 == 0;
  Tiles<kKind> tiles(problem);
  Position<kStages> at;
  Position<kTileSlots> slot;
  for (bool is_last = false; !is_last; slot.Advance()) {
    // Finding a tile takes about a microsecond: this warp does it for the others, ahead of them.
    Tile tile;
    is_last = !tiles.Next(&tile);
    if (is_leader) {
      // The first round finds rings empty: it waits for the phase before the first.
      WaitBarrier(TileEmpty(shared, slot.index), slot.parity ^ 1);
      *TileSlot(slot.index) = tile;
      Arrive(TileFull(shared, slot.index));
    }
    for (int k = 0; k < tile.num_k; k += kTileK) {
      if (is_leader) {
        WaitBarrier(Empty(shared, at.index), at.parity ^ 1);
        CopyStep<kKind>(left, right, tile, k, shared + at.index * kStageBytes,
                        Full(shared, at.index));
      }
      at.Advance();
    }
  }
}

// Zeros in the lines of both operands from `first` on, whose rows belong to others: a product of
// zero and what is there may be NaN. By both groups; each has its own block of the left operand.
__device__ inline void ClearLines(uint32_t stage, int consumer, int first) {
  constexpr int kChunks = kLine / 8;  // of 16 bytes; the swizzle keeps them in their line
  constexpr int kBlocks = kTileN / kLine / kConsumers;
  const auto clear = [&](uint32_t block) {
    for (int i = first * kChunks + threadIdx.x % kGroupThreads; i < kTileK * kChunks;
         i += kGroupThreads) {
      StoreChunk(block + i * 16, make_uint4(0, 0, 0, 0));
    }
  };
  clear(stage + consumer * kBlockBytes);
  for (int i = 0; i < kBlocks; ++i) {
    clear(stage + kLeftBytes + (consumer * kBlocks + i) * kBlockBytes);
  }
  FenceAsyncProxy();
  NamedBarrier(kCleared, kConsumers * kGroupThreads);
}

template <typename T, MatmulKind kKind>
__device__ void MultiplyStep(float (&sums)[128], uint32_t stage, int consumer, bool add) {
  constexpr TileLayout kLeft = kIsGradient<kKind> ? TileLayout::kOuter : TileLayout::kInner;
  constexpr TileLayout kRight =
      kKind == MatmulKind::kForwardTransposed ? TileLayout::kInner : TileLayout::kOuter;
  // From one k of 16 to the next: 16 elements of a line, or 16 lines.
  constexpr int kLeftStep = kLeft == TileLayout::kInner ? 32 : 2048;
  constexpr int kRightStep = kRight == TileLayout::kInner ? 32 : 2048;
  const uint64_t left = TileDescriptor(stage + consumer * (kLeftBytes / kConsumers), kBlockBytes);
  const uint64_t right = TileDescriptor(stage + kLeftBytes, kBlockBytes);
#pragma unroll
  for (int i = 0; i < kTileK / 16; ++i) {
    MultiplyTiles<T, kLeft, kRight>(sums, left + i * (kLeftStep >> 4),
                                    right + i * (kRightStep >> 4), add || i > 0);
  }
}

// By each warp, its 16 rows.
template <typename T, MatmulKind kKind>
__device__ void Store(const MatmulProblem& problem, const Tile& tile, uint32_t shared,
                      const float (&sums)[128]) {
  const int warp = threadIdx.x / 32 - kGroupThreads / 32;  // of those that multiply
  const int m = warp * 16;
  const int64_t row =
      m + (kIsGradient<kKind> ? int64_t{tile.group} * problem.num_m + tile.m : int64_t{tile.row});
  const int64_t at = row * problem.num_n + tile.n;
  const int num_n = problem.num_n - tile.n;
  if (problem.out_is_float32) {
    StoreFloat32(problem, at, tile.num_m - m, num_n, sums);
  } else {
    StoreRounded<T>(problem, shared + kStaging + warp * kStagedBytes, at, tile.num_m - m, num_n,
                    sums);
  }
}

template <typename T, MatmulKind kKind>
__device__ void Consume(const MatmulProblem& problem, uint32_t shared) {
  constexpr int kAll = kConsumers * kGroupThreads;
  const int consumer = threadIdx.x / kGroupThreads - 1;
  const bool arrives = threadIdx.x % kGroupThreads == 0;
  // One group begins two steps later than the other, so that one multiplies while the other stores.
  bool is_awaited = consumer == 0;
  bool is_later = consumer == 1;
  Position<kStages> at;
  Position<kTileSlots> slot;
  float sums[128];
  while (true) {
    WaitBarrier(TileFull(shared, slot.index), slot.parity);
    const Tile tile = *TileSlot(slot.index);
    Arrive(TileEmpty(shared, slot.index));
    slot.Advance();
    if (is_later) NamedBarrier(kLater, kAll);
    is_later = false;
    // Rows past the end of the group are only padding: often this half has no others.
    const bool has_rows = consumer * kGroupM < tile.num_m;
    int before = -1;
    for (int k = 0; k < tile.num_k; k += kTileK) {
      const uint32_t stage = shared + at.index * kStageBytes;
      WaitBarrier(Full(shared, at.index), at.parity);
      const int left = tile.num_k - k;
      if (is_awaited && (k > 0 || left <= kTileK)) {
        ArriveNamed(kLater, kAll);
        is_awaited = false;
      }
      if (kIsGradient<kKind> && left < kTileK) ClearLines(stage, consumer, left);
      if (has_rows) {
        FenceWgmma();
        MultiplyStep<T, kKind>(sums, stage, consumer, k > 0);
        CommitWgmma();
        WaitWgmma<1>();
      }
      // The batch before this one has read its stage.
      if (before >= 0 && arrives) Arrive(Empty(shared, before));
      before = at.index;
      at.Advance();
    }
    WaitWgmma<0>();
    if (before >= 0 && arrives) Arrive(Empty(shared, before));
    if (is_awaited) ArriveNamed(kLater, kAll);
    is_awaited = false;
    if (tile.num_k < 0) return;
    if (tile.num_k == 0) {
#pragma unroll
      for (float& sum : sums) sum = 0;
    }
    if (has_rows) Store<T, kKind>(problem, tile, shared, sums);
  }
}

template <typename T, MatmulKind kKind>
__global__ void __launch_bounds__(kThreads, 1)
    Sm90Kernel(const __grid_constant__ CUtensorMap left, const __grid_constant__ CUtensorMap right,
               const __grid_constant__ MatmulProblem problem) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const uint32_t shared = SharedAddress(DynamicSharedMemory());
  if (threadIdx.x == 0) {
    PrefetchTensorMap(&left);
    PrefetchTensorMap(&right);
    for (int stage = 0; stage < kStages; ++stage) {
      InitBarrier(Full(shared, stage), 1);
      InitBarrier(Empty(shared, stage), kConsumers);
    }
    for (int slot = 0; slot < kTileSlots; ++slot) {
      InitBarrier(TileFull(shared, slot), 1);
      InitBarrier(TileEmpty(shared, slot), kConsumers * kGroupThreads);
    }
    FenceBarrierInit();
  }
  __syncthreads();
  if (threadIdx.x < kGroupThreads) {
    ShrinkRegisters<kProducerRegisters>();
    if (threadIdx.x < 32) Produce<kKind>(left, right, problem, shared);
  } else {
    GrowRegisters<kConsumerRegisters>();
    Consume<T, kKind>(problem, shared);
  }
#endif
}

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
    case MatmulKind::kGradient:
      return reinterpret_cast<const void*>(Sm90Kernel<T, MatmulKind::kGradient>);
  }
  return nullptr;
}

}  // namespace

int Sm90LinesOfLeft(MatmulKind kind) { return kind == MatmulKind::kGradient ? kTileK : kTileM; }

int Sm90LinesOfRight(MatmulKind kind) {
  return kind == MatmulKind::kForwardTransposed ? kTileN : kTileK;
}

MatmulKernel Sm90MatmulKernel(bool is_bfloat16, MatmulKind kind) {
  return {.address = is_bfloat16 ? Address<BFloat16>(kind) : Address<Float16>(kind),
          .threads = kThreads,
          .shared_bytes = kSharedBytes,
          .tile_m = kTileM,
          .tile_n = kTileN,
          .stored_elements = 8};
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
