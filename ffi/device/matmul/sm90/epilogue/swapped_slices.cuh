// What the epilogues with an activation have in common, of matmuls with swapped operands (sm_90):
// how their slices go through the rounds of the staging buffer.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_SWAPPED_SLICES_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_SWAPPED_SLICES_CUH_

#include "ffi/device/matmul/sm90/epilogue/swapped_staging.cuh"

namespace jax_ep::sm90 {

// At the end of a tile its accumulators are rounded to 16 bits: 128 rows of them, or the first 128
// columns of a wide tile, into the staging buffer and the rest into registers. There each warp
// takes 16 rows, at_, in slices. Then the other half of the tile follows. Slices of a half are
// numbered from FirstSlice() on, and end_slice_ is past the last one; a warp without rows has none,
// except in wide tiles. Two more end the round and stage the next half.
//
// Epilogue, the derived class, has
//
//   FirstSlice
//   BeginHalf            called when the rows of a half are known: sets end_slice_
//   Load, Run            called for each slice: see LoadSlice and RunSlice in epilogue.cuh
//   StoreRows            called after the last slice of a half: stores the warp's rows
template <typename T, typename Epilogue>
class SwappedEpilogueSlices {
 public:
  __device__ SwappedEpilogueSlices(const Pipeline& pipeline, int warp)
      : staging_(pipeline, warp), warp_(warp) {}

  // Whether the first half of a tile ends before the next tile begins. Registers then keep no
  // second half while that one is multiplied.
  static constexpr bool kEndsFirstHalf = false;

  __device__ void BeginTile(const Tile& /*tile*/) const {}

  __device__ void LoadSlice(int k_block) {
    if (delay_ == 0 && k_block > 0) LoadSlice();
  }
  __device__ void RunSlice(int k_block) {
    if (k_block == 0) {
      if (halves_left_ > 0) Publish();
      delay_ = 1;
    } else if (delay_ > 0) {
      --delay_;
    } else {
      RunSlice<false, Epilogue::kEndsFirstHalf>();
    }
  }

  // Does both: where registers are scarce, a slice's inputs have none between them.
  __device__ void LoadAndRunSlice(int k_block) {
    if (k_block == 0) {
      if (halves_left_ > 0) Publish();
      delay_ = 1;
    } else if (delay_ > 0) {
      --delay_;
    } else {
      RunSlice<true, Epilogue::kEndsFirstHalf>();
    }
  }

  __device__ void Finish() {
    if (halves_left_ > 0) Publish();
#pragma unroll 1
    while (halves_left_ > 0) {
      if constexpr (Epilogue::kEndsFirstHalf) {
        RunSlice<true, true>();
      } else {
        LoadSlice();
        RunSlice();
      }
    }
  }

  __device__ void Close() { EpilogueStaging<>::WaitUntilComplete(); }

 protected:
  // Begins the tile at the given place.
  __device__ void Begin(const EpilogueCoordinates& at, const float (&accumulators)[kAccumulators]) {
    at_ = at;
    uint32_t words[kStagingWords];
    PackHalf<T>(accumulators, 0, words);
    Fill(words);
    PackHalf<T>(accumulators, 1, kept_);
    at_.m += warp_ * kWarpM;
    at_.num_m -= warp_ * kWarpM;
    halves_left_ = HasSecondHalf(at) ? 2 : 1;
    is_published_ = false;
    BeginHalf();
    if constexpr (Epilogue::kEndsFirstHalf) {
      if (halves_left_ == 1) return;
      Publish();
#pragma unroll 1
      while (halves_left_ == 2) RunSlice<true>();
    }
  }

  // Returns whether a warp has slices for rows that the tile does not have. Both halves of a wide
  // tile have the same rows: a warp with fewer slices would come to the second half, and wait there
  // for the others to end the first, before it has released the stages that these wait for.
  __device__ bool HasAllSlices() const { return at_.second_half_columns > 0; }

  // Keeps the next slices from the given number of k-blocks.
  __device__ void Delay(int k_blocks) { delay_ = k_blocks; }

  SwappedStaging staging_;
  const int warp_;
  EpilogueCoordinates at_ = {};  // this warp's rows of the half
  int slice_ = 0;                // next one of this half
  int end_slice_ = 0;

 private:
  __device__ Epilogue& Derived() { return static_cast<Epilogue&>(*this); }

  __device__ void Fill(const uint32_t (&words)[kStagingWords]) {
    if (at_.second_half_columns > 0) {
      staging_.FillRows(words);
    } else {
      staging_.Fill(words);
    }
  }

  __device__ void BeginHalf() {
    slice_ = Derived().FirstSlice();
    Derived().BeginHalf();
  }

  // Fences cost less while MMAs run, so the first half is published by the next tile.
  __device__ void Publish() {
    if (!is_published_) staging_.Publish();
    is_published_ = true;
  }

  __device__ void LoadSlice() {
    if (halves_left_ > 0 && slice_ < end_slice_) Derived().Load();
  }

  // `kIsLastHalf`: no half of this tile follows.
  template <bool kLoads = false, bool kIsLastHalf = false>
  __device__ void RunSlice() {
    if (halves_left_ == 0) return;
    if (slice_ < end_slice_) {
      if constexpr (kLoads) Derived().Load();
      Derived().Run();
      if (++slice_ < end_slice_) return;
      Delay(2);
      Derived().StoreRows();
    } else if (slice_ == end_slice_) {
      staging_.EndRound();
      ++slice_;
      if (halves_left_ == 1) halves_left_ = 0;
    } else if constexpr (!kIsLastHalf) {
      Fill(kept_);
      staging_.Publish();
      Delay(1);
      BeginSecondHalf(&at_);
      --halves_left_;
      BeginHalf();
    }
  }

  int halves_left_ = 0;
  int delay_ = 0;  // k-blocks until the next slice
  bool is_published_ = false;
  uint32_t kept_[kStagingWords] = {};  // the second half of the tile
};

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_SWAPPED_SLICES_CUH_
