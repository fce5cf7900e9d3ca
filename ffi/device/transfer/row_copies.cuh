// Copies rows: each is read once and stored to all of its destinations, on this rank and its peers.
// Each warp copies for itself.
#ifndef JAX_EP_DEVICE_TRANSFER_ROW_COPIES_CUH_
#define JAX_EP_DEVICE_TRANSFER_ROW_COPIES_CUH_

#include "ffi/device/protocol/peer_stores.cuh"
#include "ffi/device/ptx/bulk_copy.cuh"
#include "ffi/device/ptx/mbarrier.cuh"
#include "ffi/device/ptx/shared_memory.cuh"
#include "ffi/device/transfer/copy_pipeline.h"
#include "ffi/device/transfer/plan_rows.cuh"

namespace jax_ep {

// Bulk copies through shared memory (sm_90). One lane issues all copies of a warp, so that few
// warps keep the links busy. Up to num_stages - 2 stages load at once, and the stores of one more
// may still read theirs.
class BulkRowCopies {
 public:
  // The pipelines are in the role's shared memory. Its warps from pipeline.num_warps on have none.
  __device__ BulkRowCopies(const CopyPipeline& pipeline, const RoleContext& role,
                           int32_t row_vectors)
      : num_stages_(pipeline.num_stages),
        stage_vectors_(pipeline.stage_vectors),
        max_destinations_(pipeline.max_destinations),
        row_vectors_(row_vectors) {
    if (role.Warp() >= pipeline.num_warps) return;
    uint8_t* const shared =
        role.shared + pipeline.shared_offset + role.Warp() * CopyPipelineBytes(pipeline);
    stages_ = SharedAddress(shared);
    state_ = reinterpret_cast<CopyPipelineState*>(shared + num_stages_ * stage_vectors_ * 16);
    destinations_ = reinterpret_cast<PeerPointer<uint4>*>(state_ + 1);
    if (IsLeader()) {
      for (int stage = 0; stage < num_stages_; ++stage) MbarrierInit(FullBarrier(stage), 1);
      FenceMbarrierInit();
    }
    __syncwarp();
  }

  // Called after a wait: orders what it has acquired before this lane's bulk copies.
  __device__ void Begin() {
    if (IsLeader()) FenceProxyAsync();
  }

  // Adds a row, to be stored to all lanes' destinations: each lane has two, which may be null.
  // `has_destination` has a bit for each: l and l + 32 for lane l. Called by the whole warp, like
  // the functions below.
  __device__ void Add(const uint4* from, uint64_t has_destination,
                      const PeerPointer<uint4> (&destinations)[2]) {
    for (int first = 0; first < row_vectors_; first += stage_vectors_) {
      Load(from, first, has_destination, destinations);
      if (num_loaded_ - num_stored_ > num_stages_ - 2) StoreOldest();
    }
  }

  // Returns the number of row segments, one per stage, that have been added.
  __device__ int num_added() const { return num_loaded_; }

  // Issues the stores of the first `num_added` segments. Their sources have been read then, as the
  // warp's first lane knows.
  __device__ void Store(int num_added) {
    while (num_stored_ < num_added) StoreOldest();
  }
  __device__ void StoreAll() { Store(num_loaded_); }

  // Waits until all stores are complete. A release by any lane of this warp then covers them.
  __device__ void Finish() {
    StoreAll();
    if (IsLeader()) {
      BulkWaitGroup<0>();
      FenceProxyAsync();
    }
    __syncwarp();
  }

 private:
  __device__ static bool IsLeader() { return LaneIndex() == 0; }
  __device__ uint32_t Stage(int stage) const { return stages_ + stage * stage_vectors_ * 16; }
  __device__ uint32_t FullBarrier(int stage) const { return SharedAddress(&state_->full[stage]); }
  __device__ int NextStage(int stage) const { return stage + 1 == num_stages_ ? 0 : stage + 1; }

  // The stage's previous stores are at least two bulk groups old, so one group may be pending.
  __device__ void Load(const uint4* from, int first, uint64_t has_destination,
                       const PeerPointer<uint4> (&destinations)[2]) {
    const int stage = load_stage_;
    if (IsLeader()) {
      const int count = min(stage_vectors_, row_vectors_ - first);
      state_->first_vector[stage] = first;
      state_->num_vectors[stage] = count;
      state_->num_destinations[stage] = __popcll(has_destination);
      BulkWaitGroupRead<1>();
      MbarrierArriveExpectTx(FullBarrier(stage), count * 16);
      BulkLoad(Stage(stage), from + first, count * 16, FullBarrier(stage));
    }
    // Later: the addresses may themselves be loads in flight.
    for (int i = 0; i < 2; ++i) {
      if (!destinations[i]) continue;
      const uint64_t lower = (uint64_t{1} << (LaneIndex() + 32 * i)) - 1;
      destinations_[stage * max_destinations_ + __popcll(has_destination & lower)] =
          destinations[i];
    }
    __syncwarp();  // before the leader reads the destinations
    ++num_loaded_;
    load_stage_ = NextStage(stage);
  }

  __device__ void StoreOldest() {
    const int stage = store_stage_;
    if (IsLeader()) {
      MbarrierWait(FullBarrier(stage), store_phase_);
      for (int i = 0; i < state_->num_destinations[stage]; ++i) {
        BulkStoreToPeer(destinations_[stage * max_destinations_ + i] + state_->first_vector[stage],
                        Stage(stage), state_->num_vectors[stage] * 16);
      }
      BulkCommitGroup();
    }
    __syncwarp();  // before other lanes write new destinations
    ++num_stored_;
    store_stage_ = NextStage(stage);
    if (store_stage_ == 0) store_phase_ ^= 1;
  }

  const int num_stages_;
  const int stage_vectors_;
  const int max_destinations_;
  const int row_vectors_;
  uint32_t stages_;
  CopyPipelineState* state_;
  PeerPointer<uint4>* destinations_;
  int num_loaded_ = 0;
  int num_stored_ = 0;
  int load_stage_ = 0;
  int store_stage_ = 0;
  uint32_t store_phase_ = 0;  // of its mbarrier
};

// Copies through registers, with all lanes.
class RegisterRowCopies {
 public:
  __device__ RegisterRowCopies(const CopyPipeline& /*pipeline*/, const RoleContext& /*role*/,
                               int32_t row_vectors)
      : row_vectors_(row_vectors) {}

  __device__ void Add(const uint4* from, uint64_t has_destination,
                      const PeerPointer<uint4> (&destinations)[2]) {
    const int lane = LaneIndex();
    for (int base = lane; base - lane < row_vectors_; base += 32 * kLoads) {
      uint4 vectors[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (base + 32 * i < row_vectors_) vectors[i] = LoadGlobalNoAllocate(&from[base + 32 * i]);
      }
      for (uint64_t left = has_destination; left != 0; left &= left - 1) {
        const int destination = __ffsll(left) - 1;
        const PeerPointer<uint4> mine = destination < 32 ? destinations[0] : destinations[1];
        const PeerPointer<uint4> to = mine.Shuffle(destination % 32);
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          if (base + 32 * i < row_vectors_) StoreToPeer(to + (base + 32 * i), vectors[i]);
        }
      }
    }
  }

  __device__ void Begin() {}
  // Add() stores all that it has loaded.
  __device__ int num_added() const { return 0; }
  __device__ void Store(int /*num_added*/) { __syncwarp(); }
  __device__ void StoreAll() {}
  __device__ void Finish() { __syncwarp(); }

 private:
  static constexpr int kLoads = 8;  // vectors in flight per lane

  const int row_vectors_;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
using RowCopies = RegisterRowCopies;
#else
using RowCopies = BulkRowCopies;
#endif

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_ROW_COPIES_CUH_
