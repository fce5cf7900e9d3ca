// Copies rows: each is read once and stored to all of its destinations, on this rank and its peers.
// Each warp copies for itself.
//
// Scales of quantized rows follow the payload, in flight and in shared memory. Whole vectors of
// them go by bulk copies. The others, and those of results, are copied word by word, or byte by
// byte (scale_words.cuh).
#ifndef JAX_EP_DEVICE_TRANSFER_DISPATCH_ROW_COPIES_CUH_
#define JAX_EP_DEVICE_TRANSFER_DISPATCH_ROW_COPIES_CUH_

#include "ffi/device/protocol/peer_stores.cuh"
#include "ffi/device/ptx/bulk_copy.cuh"
#include "ffi/device/ptx/mbarrier.cuh"
#include "ffi/device/ptx/shared_memory.cuh"
#include "ffi/device/transfer/dispatch/copy_pipeline.h"
#include "ffi/device/transfer/dispatch/row_source.cuh"
#include "ffi/device/transfer/plan_rows.cuh"

namespace jax_ep {

// Bulk copies through shared memory (sm_90). One lane issues all copies of a warp, so that few
// warps keep the links busy. Up to num_stages - 2 stages load at once, and the stores of one more
// may still read theirs.
class BulkRowCopies {
 public:
  // The pipelines are in the role's shared memory. Its warps from pipeline.num_warps on have none.
  // Destinations take whole rows; or payloads, and row_scales[M, scale_bytes] takes the scales.
  __device__ BulkRowCopies(const CopyPipeline& pipeline, const RoleContext& role,
                           const CallParams& call, uint8_t* row_scales)
      : num_stages_(pipeline.num_stages),
        stage_vectors_(pipeline.stage_vectors),
        max_destinations_(pipeline.max_destinations),
        row_vectors_(call.wire_vectors),
        payload_vectors_(call.operand_vectors),
        scale_bytes_(call.scale_bytes),
        row_scales_(row_scales) {
    if (role.Warp() >= pipeline.num_warps) return;
    uint8_t* const shared =
        role.shared + pipeline.shared_offset + role.Warp() * CopyPipelineBytes(pipeline);
    shared_ = shared;
    stages_ = SharedAddress(shared);
    state_ = reinterpret_cast<CopyPipelineState*>(shared + num_stages_ * stage_vectors_ * 16);
    destinations_ = reinterpret_cast<PeerPointer<uint4>*>(state_ + 1);
    rows_ = reinterpret_cast<int32_t*>(destinations_ + num_stages_ * max_destinations_);
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
  // `has_destination` has a bit for each: l and l + 32 for lane l. `rows` are those of row_scales.
  // Called by the whole warp, like the functions below.
  __device__ void Add(const RowSource& from, uint64_t has_destination,
                      const PeerPointer<uint4> (&destinations)[2], const int32_t (&rows)[2]) {
    for (int first = 0; first < row_vectors_; first += stage_vectors_) {
      Load(from, first, has_destination, destinations, rows);
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
  __device__ void Load(const RowSource& from, int first, uint64_t has_destination,
                       const PeerPointer<uint4> (&destinations)[2], const int32_t (&rows)[2]) {
    const int stage = load_stage_;
    if (IsLeader()) {
      const int count = min(stage_vectors_, row_vectors_ - first);
      state_->first_vector[stage] = first;
      state_->num_vectors[stage] = count;
      state_->num_destinations[stage] = __popcll(has_destination);
      BulkWaitGroupRead<1>();
      if (from.scales == nullptr) {
        MbarrierArriveExpectTx(FullBarrier(stage), count * 16);
        BulkLoad(Stage(stage), from.payload + first, count * 16, FullBarrier(stage));
      } else {
        LoadParts(from, stage, first, count);
      }
    }
    if (from.scales != nullptr && !HasWholeScaleVectors()) {
      __syncwarp();  // the stage is free
      if (HasWholeScaleWords()) {
        LoadScales<int32_t>(from, stage, first);
      } else {
        LoadScales<uint8_t>(from, stage, first);
      }
      FenceProxyAsyncShared();
    }
    // Later: the addresses may themselves be loads in flight.
    for (int i = 0; i < 2; ++i) {
      if (!destinations[i]) continue;
      const uint64_t lower = (uint64_t{1} << (LaneIndex() + 32 * i)) - 1;
      const int index = stage * max_destinations_ + __popcll(has_destination & lower);
      destinations_[index] = destinations[i];
      if (row_scales_ != nullptr) rows_[index] = rows[i];
    }
    __syncwarp();  // before the leader reads the destinations
    ++num_loaded_;
    load_stage_ = NextStage(stage);
  }

  // Called by the leader. Loads a segment of a row whose scales are apart.
  __device__ void LoadParts(const RowSource& from, int stage, int first, int count) {
    const int payload = min(count, max(payload_vectors_ - first, 0));
    const int scales = HasWholeScaleVectors() ? count - payload : 0;
    MbarrierArriveExpectTx(FullBarrier(stage), (payload + scales) * 16);
    if (payload > 0) {
      BulkLoad(Stage(stage), from.payload + first, payload * 16, FullBarrier(stage));
    }
    if (scales > 0) {
      BulkLoad(Stage(stage) + payload * 16, from.scales + 16 * (first + payload - payload_vectors_),
               scales * 16, FullBarrier(stage));
    }
  }

  __device__ void StoreOldest() {
    const int stage = store_stage_;
    if (IsLeader()) {
      MbarrierWait(FullBarrier(stage), store_phase_);
      const int first = state_->first_vector[stage];
      int count = state_->num_vectors[stage];
      if (row_scales_ != nullptr) count = min(count, payload_vectors_ - first);
      const int num_destinations = count > 0 ? state_->num_destinations[stage] : 0;
      for (int i = 0; i < num_destinations; ++i) {
        BulkStoreToPeer(destinations_[stage * max_destinations_ + i] + first, Stage(stage),
                        count * 16);
      }
      BulkCommitGroup();
    }
    if (row_scales_ != nullptr) {
      MbarrierWait(FullBarrier(stage), store_phase_);
      if (HasWholeScaleWords()) {
        StoreScales<int32_t>(stage);
      } else {
        StoreScales<uint8_t>(stage);
      }
    }
    __syncwarp();  // before other lanes write new destinations
    ++num_stored_;
    store_stage_ = NextStage(stage);
    if (store_stage_ == 0) store_phase_ ^= 1;
  }

  // Whether operands have whole vectors of scales, which bulk copies need.
  __device__ bool HasWholeScaleVectors() const { return scale_bytes_ % 16 == 0; }

  // Whether a row's scales are whole words, also in operands and results, where rows are packed.
  __device__ bool HasWholeScaleWords() const { return scale_bytes_ % 4 == 0; }

  // The words or bytes of a row's scales that are in a stage.
  template <typename Unit>
  struct ScaleRange {
    int begin;
    int end;
    Unit* in_stage;  // indexed by unit of the row
  };
  template <typename Unit>
  __device__ ScaleRange<Unit> Scales(int stage, int first_vector) const {
    constexpr int kPerVector = 16 / sizeof(Unit);
    const int first = kPerVector * (first_vector - payload_vectors_);
    auto* const in_stage = reinterpret_cast<Unit*>(shared_ + stage * stage_vectors_ * 16);
    return {max(first, 0), min(first + kPerVector * stage_vectors_, NumUnits<Unit>()),
            in_stage - first};
  }
  template <typename Unit>
  __device__ int NumUnits() const {
    return scale_bytes_ / static_cast<int>(sizeof(Unit));
  }

  template <typename Unit>
  __device__ void LoadScales(const RowSource& from, int stage, int first_vector) {
    const ScaleRange<Unit> scales = Scales<Unit>(stage, first_vector);
    const auto* const units = reinterpret_cast<const Unit*>(from.scales);
    for (int i = scales.begin + LaneIndex(); i < scales.end; i += 32) {
      scales.in_stage[i] = LoadGlobalNoAllocate(&units[i]);
    }
  }

  template <typename Unit>
  __device__ void StoreScales(int stage) {
    const ScaleRange<Unit> scales = Scales<Unit>(stage, state_->first_vector[stage]);
    auto* const units = reinterpret_cast<Unit*>(row_scales_);
    for (int i = scales.begin + LaneIndex(); i < scales.end; i += 32) {
      const Unit unit = scales.in_stage[i];
      for (int j = 0; j < state_->num_destinations[stage]; ++j) {
        const int32_t row = rows_[stage * max_destinations_ + j];
        units[int64_t{row} * NumUnits<Unit>() + i] = unit;
      }
    }
  }

  const int num_stages_;
  const int stage_vectors_;
  const int max_destinations_;
  const int row_vectors_;
  const int payload_vectors_;
  const int scale_bytes_;
  uint8_t* const row_scales_;
  uint8_t* shared_;
  uint32_t stages_;
  CopyPipelineState* state_;
  PeerPointer<uint4>* destinations_;
  int32_t* rows_;  // with row_scales, of the destinations
  int num_loaded_ = 0;
  int num_stored_ = 0;
  int load_stage_ = 0;
  int store_stage_ = 0;
  uint32_t store_phase_ = 0;  // its mbarrier completes next
};

// Copies through registers, with all lanes.
class RegisterRowCopies {
 public:
  __device__ RegisterRowCopies(const CopyPipeline& /*pipeline*/, const RoleContext& /*role*/,
                               const CallParams& call, uint8_t* row_scales)
      : call_(call), payload_vectors_(call.operand_vectors), row_scales_(row_scales) {}

  __device__ void Add(const RowSource& from, uint64_t has_destination,
                      const PeerPointer<uint4> (&destinations)[2], const int32_t (&rows)[2]) {
    const int lane = LaneIndex();
    for (int base = lane; base - lane < payload_vectors_; base += 32 * kLoads) {
      uint4 vectors[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (base + 32 * i < payload_vectors_) {
          vectors[i] = LoadGlobalNoAllocate(&from.payload[base + 32 * i]);
        }
      }
      for (uint64_t left = has_destination; left != 0; left &= left - 1) {
        const int destination = __ffsll(left) - 1;
        const PeerPointer<uint4> mine = destination < 32 ? destinations[0] : destinations[1];
        const PeerPointer<uint4> to = mine.Shuffle(destination % 32);
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          if (base + 32 * i < payload_vectors_) StoreToPeer(to + (base + 32 * i), vectors[i]);
        }
      }
    }
    if (call_.num_scale_words > 0) AddScales(from, has_destination, destinations, rows);
  }

  __device__ void Begin() {}
  // Add() stores all that it has loaded.
  __device__ int num_added() const { return 0; }
  __device__ void Store(int /*num_added*/) { __syncwarp(); }
  __device__ void StoreAll() {}
  __device__ void Finish() { __syncwarp(); }

 private:
  static constexpr int kLoads = 8;  // vectors in flight per lane

  __device__ void AddScales(const RowSource& from, uint64_t has_destination,
                            const PeerPointer<uint4> (&destinations)[2], const int32_t (&rows)[2]) {
    const ScaleSource scales = from.Scales(call_);
    for (int first = 0; first < call_.num_scale_words; first += 32) {
      const int i = first + LaneIndex();
      const int32_t word = i < call_.num_scale_words ? scales.Load(i) : 0;
      for (uint64_t left = has_destination; left != 0; left &= left - 1) {
        const int destination = __ffsll(left) - 1;
        const PeerPointer<uint4> mine = destination < 32 ? destinations[0] : destinations[1];
        ScaleDestination to = ScalesInFlight(call_, mine.Shuffle(destination % 32));
        if (row_scales_ != nullptr) {
          const int32_t row =
              __shfl_sync(kFullWarp, destination < 32 ? rows[0] : rows[1], destination % 32);
          to = {PeerPointer<uint8_t>(row_scales_) + int64_t{row} * call_.scale_bytes,
                call_.scale_bytes};
        }
        if (i < call_.num_scale_words) to.Store(i, word);
      }
    }
  }

  const CallParams& call_;
  const int payload_vectors_;
  uint8_t* const row_scales_;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
using RowCopies = RegisterRowCopies;
#else
using RowCopies = BulkRowCopies;
#endif

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_DISPATCH_ROW_COPIES_CUH_
