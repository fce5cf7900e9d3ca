// Moves rows, each read once and stored to all of its places, here and at peers. By single warps.
#ifndef JAX_EP_DEVICE_TRANSFER_ROW_COPIES_CUH_
#define JAX_EP_DEVICE_TRANSFER_ROW_COPIES_CUH_

#include "ffi/device/ptx/bulk_copy.cuh"
#include "ffi/device/ptx/mbarrier.cuh"
#include "ffi/device/ptx/shared_memory.cuh"
#include "ffi/device/transfer/copy_pipeline.h"
#include "ffi/device/transfer/plan_rows.cuh"

namespace jax_ep {

// By the copy engine (sm_90): one lane has all of a warp's copies on their way, so that a few warps
// keep the links busy. While a stage is loaded, so are the num_stages - 3 before it, and the stores
// of one more may still read theirs.
class BulkRowCopies {
 public:
  // In the block's dynamic shared memory. `warp` is this one's number among those that have a ring,
  // or beyond these.
  __device__ BulkRowCopies(const CopyPipeline& ring, int warp, int32_t row_vectors)
      : num_stages_(ring.num_stages),
        stage_chunks_(ring.stage_vectors),
        num_places_(ring.num_places),
        row_chunks_(row_vectors) {
    if (warp >= ring.num_warps) return;
    uint8_t* const shared =
        DynamicSharedMemory() + ring.first_byte + warp * CopyPipelineBytes(ring);
    stages_ = SharedAddress(shared);
    state_ = reinterpret_cast<CopyPipelineState*>(shared + num_stages_ * stage_chunks_ * 16);
    places_ = reinterpret_cast<uint4**>(state_ + 1);
    if (IsLeader()) {
      for (int stage = 0; stage < num_stages_; ++stage) MbarrierInit(Loaded(stage), 1);
      FenceMbarrierInit();
    }
    __syncwarp();
  }

  // After a gate: what it has acquired comes before this lane's copies.
  __device__ void Begin() {
    if (IsLeader()) FenceProxyAsync();
  }

  // A row to each of the places that the lanes have, two at most a lane, null where there is none.
  // `has_place` has a bit for each: lane l's are l and l + 32. By the whole warp, like the others.
  __device__ void Add(const uint4* from, uint64_t has_place, uint4* const (&places)[2]) {
    for (int first = 0; first < row_chunks_; first += stage_chunks_) {
      Load(from, first, has_place, places);
      if (num_loaded_ - num_stored_ > num_stages_ - 2) StoreOldest();
    }
  }

  // How many parts of rows have been added.
  __device__ int num_added() const { return num_loaded_; }

  // Sends what was added first to its places: it has been read then, as this warp's first lane
  // knows.
  __device__ void Store(int num_added) {
    while (num_stored_ < num_added) StoreOldest();
  }
  __device__ void StoreAll() { Store(num_loaded_); }

  // All is complete when it returns, and a release by any lane of this warp covers it.
  __device__ void Finish() {
    StoreAll();
    if (IsLeader()) {
      BulkWaitGroup<0>();
      FenceProxyAsync();
    }
    __syncwarp();
  }

 private:
  __device__ static bool IsLeader() { return threadIdx.x % 32 == 0; }
  __device__ uint32_t Stage(int stage) const { return stages_ + stage * stage_chunks_ * 16; }
  __device__ uint32_t Loaded(int stage) const { return SharedAddress(&state_->loaded[stage]); }

  // The stage's earlier stores were sent two rows ago: one batch may follow them.
  __device__ void Load(const uint4* from, int first, uint64_t has_place,
                       uint4* const (&places)[2]) {
    const int stage = num_loaded_ % num_stages_;
    for (int half = 0; half < 2; ++half) {
      if (places[half] == nullptr) continue;
      const uint64_t lower = (uint64_t{1} << (threadIdx.x % 32 + 32 * half)) - 1;
      places_[stage * num_places_ + __popcll(has_place & lower)] = places[half];
    }
    if (IsLeader()) {
      const int count = min(stage_chunks_, row_chunks_ - first);
      state_->first[stage] = first;
      state_->count[stage] = count;
      state_->num_places[stage] = __popcll(has_place);
      BulkWaitGroupRead<1>();
      MbarrierArriveExpectTx(Loaded(stage), count * 16);
      BulkLoad(Stage(stage), from + first, count * 16, Loaded(stage));
    }
    __syncwarp();  // before the leader reads the places
    ++num_loaded_;
  }

  __device__ void StoreOldest() {
    if (IsLeader()) {
      const int stage = num_stored_ % num_stages_;
      MbarrierWait(Loaded(stage), num_stored_ / num_stages_ % 2);
      for (int i = 0; i < state_->num_places[stage]; ++i) {
        BulkStore(places_[stage * num_places_ + i] + state_->first[stage], Stage(stage),
                  state_->count[stage] * 16);
      }
      BulkCommitGroup();
    }
    __syncwarp();  // before other lanes write new places
    ++num_stored_;
  }

  const int num_stages_;
  const int stage_chunks_;
  const int num_places_;
  const int row_chunks_;
  uint32_t stages_;
  CopyPipelineState* state_;
  uint4** places_;
  int num_loaded_ = 0;
  int num_stored_ = 0;
};

// Through registers, by all lanes.
class RegisterRowCopies {
 public:
  __device__ RegisterRowCopies(const CopyPipeline& /*ring*/, int /*warp*/, int32_t row_vectors)
      : row_chunks_(row_vectors) {}

  __device__ void Add(const uint4* from, uint64_t has_place, uint4* const (&places)[2]) {
    const int lane = threadIdx.x % 32;
    for (int base = lane; base - lane < row_chunks_; base += 32 * kLoads) {
      uint4 chunks[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (base + 32 * i < row_chunks_) chunks[i] = LoadGlobalNoAllocate(&from[base + 32 * i]);
      }
      for (uint64_t left = has_place; left != 0; left &= left - 1) {
        const int place = __ffsll(left) - 1;
        const auto mine = reinterpret_cast<uint64_t>(place < 32 ? places[0] : places[1]);
        uint4* const to = reinterpret_cast<uint4*>(__shfl_sync(kFullWarp, mine, place % 32));
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          if (base + 32 * i < row_chunks_) to[base + 32 * i] = chunks[i];
        }
      }
    }
  }

  __device__ void Begin() {}
  // Add() has used all that it has loaded.
  __device__ int num_added() const { return 0; }
  __device__ void Store(int /*num_added*/) { __syncwarp(); }
  __device__ void StoreAll() {}
  __device__ void Finish() { __syncwarp(); }

 private:
  static constexpr int kLoads = 8;  // chunks in flight of a lane

  const int row_chunks_;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
using RowCopies = RegisterRowCopies;
#else
using RowCopies = BulkRowCopies;
#endif

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_ROW_COPIES_CUH_
