// Activation epilogue of the matmuls with swapped operands (sm_90): a bias, an activation, and row
// weights.
//
// A tile's columns are 128 of the pre-activation, or 64 gate columns, which the first warpgroup
// has, and their 64 up columns, which the second one has. At the end of a tile the accumulators are
// rounded to the 16-bit pre-activation, 128 rows of it into the staging buffer and the rest into
// registers. There each warp takes 16 rows: its slices store the pre-activation if it is kept, and
// replace it by the activations.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_SWAPPED_EPILOGUE_ACTIVATION_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_SWAPPED_EPILOGUE_ACTIVATION_CUH_

#include "ffi/device/matmul/activation.cuh"
#include "ffi/device/matmul/sm90/row_weights.cuh"
#include "ffi/device/matmul/sm90/swapped_staging.cuh"
#include "ffi/device/matmul/sm90/tensor_maps.h"
#include "ffi/device/ptx/element_types.cuh"
#include "ffi/device/ptx/tma.cuh"

namespace jax_ep::sm90 {

template <typename T>
class SwappedActivationEpilogue {
 public:
  __device__ SwappedActivationEpilogue(const MatmulParams& params, const MatmulTensorMaps& maps,
                                       const Pipeline& pipeline, int warp)
      : epilogue_(params.epilogue),
        columns_(params.shape_n),
        maps_(maps),
        staging_(pipeline, warp),
        warp_(warp) {}

  // Called with the tile's place.
  __device__ void Store(const MatmulParams& /*params*/, const EpilogueCoordinates& at,
                        int /*num_warpgroups*/, float (&accumulators)[kAccumulators]) {
    if (epilogue_.bias != nullptr) AddBias(at, accumulators);
    if (epilogue_.activation.is_identity && epilogue_.row_weights != nullptr) {
      // Without an activation the result is rounded once, so the weight comes before rounding.
      MultiplyByRowWeights(at, accumulators);
    }
    uint32_t words[kStagingWords];
    PackHalf<T>(accumulators, 0, words);
    staging_.Fill(words);
    PackHalf<T>(accumulators, 1, kept_);
    at_ = at;
    at_.m += warp_ * kWarpM;
    at_.num_m -= warp_ * kWarpM;
    weights_.Load(epilogue_.row_weights, at_);
    halves_left_ = at.num_m > kSwappedBufferRows ? 2 : 1;
    slice_ = FirstSlice();
    is_published_ = false;
  }

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
      RunSlice();
    }
  }

  __device__ void Finish() {
    if (halves_left_ > 0) Publish();
#pragma unroll 1
    while (halves_left_ > 0) {
      LoadSlice();
      RunSlice();
    }
  }

  __device__ void Close() { EpilogueStaging::WaitUntilComplete(); }

 private:
  static constexpr int kSliceWords = 4;

  // Slices of a half: 0 stores the pre-activation, if it is kept; those up to LastSlice() compute
  // kSliceWords words of activations each, and the last of them stores the activations; two more
  // end the round and stage the next half.
  __device__ bool KeepsPreActivation() const { return epilogue_.pre_activation != nullptr; }
  __device__ int FirstSlice() const {
    return KeepsPreActivation() || epilogue_.activation.is_identity ? 0 : 1;
  }
  __device__ int LastSlice() const {
    const ActivationFunction& f = epilogue_.activation;
    return f.is_identity ? 0 : (f.is_gated ? kBoxWords : kStagingWords) / kSliceWords;
  }

  __device__ void Publish() {
    if (!is_published_) staging_.Publish();
    is_published_ = true;
  }

  __device__ void LoadSlice() {
    if (halves_left_ == 0 || slice_ == 0 || slice_ > LastSlice()) return;
    if (slice_ == 1 && !KeepsPreActivation()) staging_.WaitUntilStaged();
    const int word = (slice_ - 1) * kSliceWords;
    staging_.ReadWords(word, words_);
    if (epilogue_.activation.is_gated) staging_.ReadWords(kBoxWords + word, up_words_);
  }

  __device__ void RunSlice() {
    if (halves_left_ == 0) return;
    const ActivationFunction& f = epilogue_.activation;
    const int last = LastSlice();
    if (slice_ > last) {
      if (slice_ == last + 1) {
        staging_.EndRound();
        delay_ = 0;
        ++slice_;
        if (halves_left_ == 1) halves_left_ = 0;
      } else {
        staging_.Fill(kept_);
        staging_.Publish();
        delay_ = 1;
        at_.m += kSwappedBufferRows;
        at_.num_m -= kSwappedBufferRows;
        weights_.Load(epilogue_.row_weights, at_);
        --halves_left_;
        slice_ = FirstSlice();
      }
      return;
    }
    if (slice_ == 0) {
      staging_.WaitUntilStaged();
      if (KeepsPreActivation()) StorePreActivation();
      delay_ = 2;
    } else {
      if (slice_ == 1 && KeepsPreActivation()) EpilogueStaging::WaitUntilRead();
      const int word = (slice_ - 1) * kSliceWords;
      SpecializeForActivation(
          f, [&]<bool kIsGated, bool kIsSmooth>() { ActivateWords<kIsGated, kIsSmooth>(word); });
    }
    if (slice_++ < last) return;
    delay_ = 2;
    if (at_.num_m > 0) {
      staging_.Store(&maps_.out, PrefixBox(at_), f.is_gated ? 1 : kStagingBoxes);
    }
  }

  __device__ void StorePreActivation() const {
    if (at_.num_m <= 0) return;
    const TmaCoordinates box = PrefixBox(at_);
    if (!epilogue_.activation.is_gated) return staging_.Store(maps_.pre_activation, box);
    for (int i = 0; i < kStagingBoxes; ++i) {
      staging_.Store(&maps_.pre_activation[i], box, 1, i);
    }
  }

  // Replaces words of the pre-activation by words of activations.
  template <bool kIsGated, bool kIsSmooth>
  __device__ void ActivateWords(uint32_t first_word) {
    const ActivationFunction& f = epilogue_.activation;
#pragma unroll
    for (int i = 0; i < kSliceWords; ++i) {
      float values[2], up[2];
      T::Unpack(words_[i], values);
      if constexpr (kIsGated) T::Unpack(up_words_[i], up);
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        float value = ActivateFast<kIsSmooth>(f, values[x]).value;
        if constexpr (kIsGated) value *= up[x];
        values[x] = weights_.values[i % 2] * value;
      }
      words_[i] = T::Pack(values);
    }
    staging_.WriteWords(first_word, words_);
  }

  __device__ void AddBias(const EpilogueCoordinates& at,
                          float (&accumulators)[kAccumulators]) const {
    const bool is_gated = epilogue_.activation.is_gated;
    const bool is_second = warp_ >= kWarpgroupWarps;
    const float* const bias = epilogue_.bias + int64_t{at.group} * columns_ * (is_gated ? 2 : 1) +
                              (is_gated && is_second ? columns_ : 0);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int column = at.n + (is_gated ? warp_ % kWarpgroupWarps : warp_) * kWarpM + 8 * h +
                         threadIdx.x % 32 / 4;
      const float value = column < columns_ ? bias[column] : 0.0f;
#pragma unroll
      for (int j = 0; j < kAccumulators / 4; ++j) {
        accumulators[4 * j + 2 * h] += value;
        accumulators[4 * j + 2 * h + 1] += value;
      }
    }
  }

  __device__ void MultiplyByRowWeights(const EpilogueCoordinates& at,
                                       float (&accumulators)[kAccumulators]) const {
#pragma unroll
    for (int j = 0; j < kAccumulators / 4; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 8 * j + threadIdx.x % 4 * 2 + i;
        const float weight = row < at.num_m ? epilogue_.row_weights[at.m + row] : 1.0f;
        accumulators[4 * j + i] *= weight;
        accumulators[4 * j + 2 + i] *= weight;
      }
    }
  }

  const EpilogueParams& epilogue_;
  const int columns_;
  const MatmulTensorMaps& maps_;
  SwappedStaging staging_;
  const int warp_;
  EpilogueCoordinates at_ = {};
  RowWeights weights_ = {};
  int halves_left_ = 0;
  int slice_ = 0;  // next one of this half
  int delay_ = 0;  // k-blocks until then
  bool is_published_ = false;
  uint32_t words_[kSliceWords] = {};
  uint32_t up_words_[kSliceWords] = {};
  uint32_t kept_[kStagingWords] = {};  // the second half of the rows
};

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_SWAPPED_EPILOGUE_ACTIVATION_CUH_
