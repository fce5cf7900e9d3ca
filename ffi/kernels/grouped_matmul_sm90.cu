// Grouped matmuls of 16-bit elements on sm_90a: one warp copies tiles by the copy engine, eight
// warps multiply them, four at a time in one instruction.
#include "ffi/device/fused_rows.cuh"
#include "ffi/device/gradient_rows.cuh"
#include "ffi/device/mbarrier.cuh"
#include "ffi/device/result_rows.cuh"
#include "ffi/device/sm90_pipeline.cuh"
#include "ffi/device/tensor_map.h"
#include "ffi/device/tile_claims.cuh"
#include "ffi/device/wgmma.cuh"
#include "ffi/kernels/grouped_matmul_kernels.h"

namespace jax_ep {
namespace sm90 {

// One step along k of both operands. By one thread. `up_n`: columns from gate to up, or 0.
template <MatmulKind kKind>
__device__ void CopyStep(const CUtensorMap& left, const CUtensorMap& right, const Tile& tile, int k,
                         int up_n, uint32_t stage, uint32_t barrier) {
  // Without rows for the second consumer its half of left is left out.
  const int num_halves = tile.num_m > kGroupM ? 2 : 1;
  ArriveExpecting(barrier, kRightBytes + num_halves * kLeftHalfBytes);
  const uint32_t to = stage + kLeftBytes;
  for (int i = 0; i < num_halves; ++i) {
    const int m = tile.m + i * kGroupM;
    // Rows past the group's end are copied, multiplied, and not stored.
    CopyBox(stage + i * kLeftHalfBytes, &left, barrier, kIsGradient<kKind> ? m : k,
            kIsGradient<kKind> ? k : m, 0);
  }
  if constexpr (kIsTransposed<kKind>) {
    CopyBox(to, &right, barrier, k, tile.n, tile.group);
  } else {
    for (int i = 0; i < kTileN / kLine; ++i) {
      // Beside the columns of a gate, half of the tile, are those that it multiplies.
      const bool is_up = kIsActivation<kKind> && up_n > 0 && i >= kTileN / kLine / 2;
      const int n = tile.n + i * kLine + (is_up ? up_n - kTileN / 2 : 0);
      CopyBox(to + i * kBlockBytes, &right, barrier, n, k, kIsGradient<kKind> ? 0 : tile.group);
    }
  }
}

// Finding a tile takes about a microsecond: one warp does it for the others, ahead of them.
template <MatmulKind kKind>
__device__ void Schedule(const MatmulProblem& problem, uint32_t shared) {
  const bool is_leader = threadIdx.x % 32 == 0;
  Tiles<kKind> tiles(problem);
  TileClaims claims(problem.tile_counter);
  Position<kTileSlots> slot;
  Position<1> wanted;
  while (true) {
    const Tile tile = tiles.Find(__shfl_sync(0xffffffffu, claims.index(), 0));
    if (is_leader) {
      // The first round finds the ring empty: it waits for the phase before the first.
      WaitBarrier(TileEmpty(shared, slot.index), slot.parity ^ 1);
      *TileSlot(slot.index) = tile;
      Arrive(TileFull(shared, slot.index));
    }
    if (tile.num_k == 0) break;
    if (is_leader) {
      WaitBarrier(TileWanted(shared), wanted.parity);
      claims.Next();
    }
    slot.Advance();
    wanted.Advance();
  }
  if (is_leader) claims.Finish();
}

// By one warp, of which one thread copies.
template <MatmulKind kKind>
__device__ void Produce(const CUtensorMap& left, const CUtensorMap& right,
                        const MatmulProblem& problem, uint32_t shared) {
  const bool is_leader = threadIdx.x % 32 == 0;
  const int up_n = problem.epilogue.activation.is_gated ? problem.num_n : 0;
  Position<kStages> at;
  Position<kTileSlots> slot;
  while (true) {
    WaitBarrier(TileFull(shared, slot.index), slot.parity);
    const Tile tile = ReadTile(slot.index);
    if (is_leader) Arrive(TileEmpty(shared, slot.index));
    slot.Advance();
    if (tile.num_k == 0) return;
    // Claimed as late as it can be: a tile that waits would begin after its neighbours.
    const int want_at = max((tile.num_k - 1) / kTileK - kStages, 0) * kTileK;
    for (int k = 0; k < tile.num_k; k += kTileK) {
      if (is_leader) {
        WaitBarrier(Empty(shared, at.index), at.parity ^ 1);
        CopyStep<kKind>(left, right, tile, tile.k + k, up_n, shared + at.index * kStageBytes,
                        Full(shared, at.index));
        if (k == want_at) Arrive(TileWanted(shared));
      }
      at.Advance();
    }
    __syncwarp();
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
  constexpr TileLayout kRight = kIsTransposed<kKind> ? TileLayout::kInner : TileLayout::kOuter;
  // From one k of 16 to the next: 16 elements of a line, or 16 lines.
  constexpr int kLeftStep = kLeft == TileLayout::kInner ? 32 : 2048;
  constexpr int kRightStep = kRight == TileLayout::kInner ? 32 : 2048;
  const uint32_t left = TileDescriptor(stage + consumer * kLeftHalfBytes, kBlockBytes);
  const uint32_t right = TileDescriptor(stage + kLeftBytes, kBlockBytes);
  FenceWgmma();
#pragma unroll
  for (int i = 0; i < kTileK / 16; ++i) {
    MultiplyTiles<T, kLeft, kRight>(sums, left + i * (kLeftStep >> 4),
                                    right + i * (kRightStep >> 4), add || i > 0);
  }
  CommitWgmma();
}

// What takes a tile's sums at its end, and goes on after steps of the next.
template <typename T, MatmulKind kKind>
struct Sink {
  ResultRows rows;

  __device__ Sink(const MatmulProblem& /*problem*/, const ResultMatrix& out, uint32_t staging)
      : rows(out, staging) {}

  __device__ void Store(const MatmulProblem& problem, const ResultPlace& place, int /*group*/,
                        const float (&sums)[128]) {
    if (problem.out_is_float32) {
      rows.StoreFloat32(place, sums);
    } else {
      rows.StoreRounded<T>(place, sums);
    }
  }

  // The second step waits for the copies of the first.
  __device__ void AfterStep(int k) {
    if (k == 0 || k == kStages * kTileK) rows.Continue();
  }
};

template <typename Rows>
struct FusedSink {
  Rows rows;

  __device__ FusedSink(const MatmulProblem& problem, const ResultMatrix& out, uint32_t staging)
      : rows(problem, out, staging) {}

  __device__ void Store(const MatmulProblem& /*problem*/, const ResultPlace& place, int group,
                        float (&sums)[128]) {
    rows.Store(place, group, sums);
  }

  __device__ void AfterStep(int /*k*/) { rows.Continue(); }
};

template <typename T>
struct Sink<T, MatmulKind::kActivation> : FusedSink<ActivationRows<T>> {
  using FusedSink<ActivationRows<T>>::FusedSink;
};

template <typename T>
struct Sink<T, MatmulKind::kActivationGradient> : FusedSink<GradientRows<T>> {
  using FusedSink<GradientRows<T>>::FusedSink;
};

template <typename T, MatmulKind kKind>
__device__ void Consume(const MatmulTensorMaps& maps, const MatmulProblem& problem,
                        uint32_t shared) {
  const int warp = Uniform(threadIdx.x / 32) - kGroupThreads / 32;  // of those that multiply
  const int consumer = warp / (kGroupThreads / 32);
  const bool arrives = threadIdx.x % 32 == 0;
  const ResultMatrix out = {&maps.out, problem.out, problem.num_m, problem.num_n, problem.num_n};
  Sink<T, kKind> sink(problem, out, shared + kStaging + warp * kStagedBytes);
  Position<kStages> at;
  Position<kTileSlots> slot;
  const auto next_tile = [&] {
    WaitBarrier(TileFull(shared, slot.index), slot.parity);
    const Tile tile = ReadTile(slot.index);
    if (arrives) Arrive(TileEmpty(shared, slot.index));
    slot.Advance();
    return tile;
  };
  bool is_full = false;
  float sums[128];
  for (Tile tile = next_tile(), next; tile.num_k > 0; tile = next) {
    // Rows past the end of the group are only padding: often this half has no others.
    const bool has_rows = consumer * kGroupM < tile.num_m;
    int before = -1;
    for (int k = 0; k < tile.num_k; k += kTileK) {
      const uint32_t stage = shared + at.index * kStageBytes;
      if (!is_full) WaitBarrier(Full(shared, at.index), at.parity);
      if constexpr (kIsGradient<kKind>) {
        const int left = tile.num_k - k;
        if (left < kTileK) ClearLines(stage, consumer, left);
      }
      const int current = at.index;
      at.Advance();
      if (has_rows) {
        MultiplyStep<T, kKind>(sums, stage, consumer, k > 0);
        // While the matrix units are at work: what the tile before has left to do.
        sink.AfterStep(k);
        is_full = IsComplete(Full(shared, at.index), at.parity);
        WaitWgmma<1>();
      } else {
        is_full = false;
      }
      // The batch before this one has read its stage.
      __syncwarp();
      if (before >= 0 && arrives) Arrive(Empty(shared, before));
      before = current;
    }
    if (has_rows) sink.rows.Finish();
    next = next_tile();
    WaitWgmma<0>();
    FenceSums(sums);
    __syncwarp();
    if (arrives) Arrive(Empty(shared, before));
    if (!has_rows) continue;
    const int m = warp * kResultM;
    const ResultPlace place = {.group = kIsGradient<kKind> ? tile.group : 0,
                               .m = tile.m + m,
                               .n = tile.n,
                               .num_m = tile.num_m - m};
    sink.Store(problem, place, tile.group, sums);
    FenceSums(sums);
  }
  sink.rows.Close();
}

template <typename T, MatmulKind kKind>
__global__ void __launch_bounds__(kThreads, 1)
    Sm90Kernel(const __grid_constant__ MatmulTensorMaps maps,
               const __grid_constant__ MatmulProblem problem) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const uint32_t shared = SharedAddress(DynamicSharedMemory());
  if (threadIdx.x == 0) {
    PrefetchTensorMap(&maps.left);
    PrefetchTensorMap(&maps.right);
    PrefetchTensorMap(&maps.out);
    for (int stage = 0; stage < kStages; ++stage) {
      InitBarrier(Full(shared, stage), 1);
      InitBarrier(Empty(shared, stage), kConsumerWarps);
    }
    for (int slot = 0; slot < kTileSlots; ++slot) {
      InitBarrier(TileFull(shared, slot), 1);
      InitBarrier(TileEmpty(shared, slot), kConsumerWarps + 1);
    }
    InitBarrier(TileWanted(shared), 1);
    FenceBarrierInit();
  }
  __syncthreads();
  if (threadIdx.x < kGroupThreads) {
    ShrinkRegisters<kProducerRegisters>();
    const int warp = Uniform(threadIdx.x / 32);
    if (warp == 0) Produce<kKind>(maps.left, maps.right, problem, shared);
    if (warp == 1) Schedule<kKind>(problem, shared);
  } else {
    GrowRegisters<kConsumerRegisters>();
    Consume<T, kKind>(maps, problem, shared);
  }
#else
  __trap();  // a build for compute capability 9.0 has to be one for sm_90a
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
    case MatmulKind::kActivation:
      return reinterpret_cast<const void*>(Sm90Kernel<T, MatmulKind::kActivation>);
    case MatmulKind::kActivationGradient:
      return reinterpret_cast<const void*>(Sm90Kernel<T, MatmulKind::kActivationGradient>);
  }
  return nullptr;
}

}  // namespace

int Sm90LinesOfLeft(MatmulKind kind) { return kind == MatmulKind::kGradient ? kTileK : kGroupM; }

int Sm90LinesOfRight(MatmulKind kind) { return IsTransposed(kind) ? kTileN : kTileK; }

static_assert(kSm90LinesOfOut == kResultM);
static_assert(kNumSm90TileCounters == kNumTileCounters);

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
