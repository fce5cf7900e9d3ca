// Activation epilogue (sm_90): one warp adds the bias to 16 x 256 accumulators, applies the
// activation, and multiplies by row weights.
//
// At the end of a tile the accumulators are rounded to the 16-bit pre-activation, half of it into
// the staging buffer and half into registers. The slices (epilogue.cuh) store the pre-activation if
// it is kept, and replace it in the staging buffer by the activations. They reread it from there,
// which leaves the registers to the accumulators.
//
// If the activation is gated, a tile has 128 gate columns and the 128 up columns that they
// multiply. Each half then stages 64 gate columns in box 0 and their up columns in box 1.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_ACTIVATION_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_ACTIVATION_CUH_

#include "ffi/device/matmul/activation.cuh"
#include "ffi/device/matmul/sm90/epilogue_staging.cuh"
#include "ffi/device/matmul/sm90/tensor_maps.h"
#include "ffi/device/ptx/element_types.cuh"
#include "ffi/device/ptx/tma.cuh"

namespace jax_ep::sm90 {

// The weights of the two rows that a lane has accumulators of.
struct RowWeights {
  float values[2];

  __device__ void Load(const float* weights, const EpilogueCoordinates& at) {
    for (int half = 0; half < 2; ++half) {
      const int m = threadIdx.x % 32 / 4 + 8 * half;
      values[half] = weights != nullptr && m < at.num_m ? weights[at.m + m] : 1.0f;
    }
  }
};

template <typename T, int kHalves>
class ActivationEpilogue {
 public:
  static constexpr int kCount = kHalves * kAccumulators / 2;  // accumulators per thread

  __device__ ActivationEpilogue(const MatmulParams& params, const MatmulTensorMaps& maps,
                                uint32_t staging)
      : epilogue_(params.epilogue), columns_(params.shape_n), maps_(maps), staging_(staging) {}

  __device__ void Store(const MatmulParams& /*params*/, const EpilogueCoordinates& at,
                        float (&accumulators)[kCount]) {
    at_ = at;
    weights_.Load(epilogue_.row_weights, at);
    if (epilogue_.bias != nullptr) AddBias(accumulators);
    if (epilogue_.activation.is_identity && epilogue_.row_weights != nullptr) {
      // Without an activation the result is rounded once, so the weight comes before rounding.
#pragma unroll
      for (int i = 0; i < kCount; ++i) accumulators[i] *= weights_.values[i / 2 % 2];
    }
    // Branches once, not for each accumulator: the tensor cores are waiting.
    if (epilogue_.activation.is_gated) {
      Round<true>(accumulators);
    } else {
      Round<false>(accumulators);
    }
    half_ = 0;
    slice_ = 0;
  }

  __device__ void LoadSlice() {
    if (half_ == kHalves || slice_ == 0) return;
    const int word = (slice_ - 1) * kSliceWords;
    staging_.ReadWords(word, words_);
    if (epilogue_.activation.is_gated) staging_.ReadWords(kBoxWords + word, up_words_);
  }

  // The first slice of a half stages and stores the pre-activation; the others compute kSliceWords
  // words of activations each.
  __device__ void RunSlice(int /*k_block*/ = 0) {
    if (half_ == kHalves) return;
    const ActivationFunction& f = epilogue_.activation;
    const bool keeps_pre_activation = epilogue_.pre_activation != nullptr;
    if (slice_ == 0) {
      if (kHalves == 2 && half_ == 1) staging_.Replace(kept_);
      if (keeps_pre_activation) StorePreActivation();
    } else {
      if (slice_ == 1 && keeps_pre_activation) staging_.WaitUntilRead();
      const int word = (slice_ - 1) * kSliceWords;
      SpecializeForActivation(
          f, [&]<bool kIsGated, bool kIsSmooth>() { ActivateWords<kIsGated, kIsSmooth>(word); });
    }
    if (++slice_ <= NumWords() / kSliceWords) return;
    staging_.Store<2>(&maps_.out, PrefixBox(at_), f.is_gated ? 1 : kStagingBoxes);
    at_.n += f.is_gated ? kStagingColumns / 2 : kStagingColumns;
    slice_ = 0;
    ++half_;
  }

  __device__ void Finish() {
#pragma unroll 1
    while (half_ < kHalves) {
      LoadSlice();
      RunSlice();
    }
  }

  __device__ void Close() { staging_.WaitUntilComplete(); }

 private:
  static constexpr int kStagingColumns = kTileN / 2;
  static constexpr int kSliceWords = 4;

  // Returns the words of activations that each lane computes per half.
  __device__ int NumWords() const {
    const ActivationFunction& f = epilogue_.activation;
    return f.is_identity ? 0 : f.is_gated ? kBoxWords : kStagingWords;
  }

  // Rounds the first half into the staging buffer and the second into kept_.
  template <bool kIsGated>
  __device__ void Round(const float (&accumulators)[kCount]) {
    const auto round = [&](int half, uint32_t (&words)[kStagingWords]) {
#pragma unroll
      for (int i = 0; i < kStagingWords; ++i) {
        // A gated half takes box `half` of the gate's and of the up's; a plain one two adjacent
        // boxes.
        const int gated = (i / kBoxWords * kHalves + half) * kBoxWords + i % kBoxWords;
        const int plain = half * kStagingWords + i;
        words[i] = T::Pack(accumulators + 2 * (kIsGated ? gated : plain));
      }
    };
    uint32_t words[kStagingWords];
    round(0, words);
    staging_.Replace(words);
    if constexpr (kHalves == 2) round(1, kept_);
  }

  __device__ void StorePreActivation() const {
    const TmaCoordinates box = PrefixBox(at_);
    if (!epilogue_.activation.is_gated) return staging_.Store<2>(maps_.pre_activation, box);
    for (int i = 0; i < kStagingBoxes; ++i) {
      staging_.Store<2>(&maps_.pre_activation[i], box, 1, i);
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

  __device__ void AddBias(float (&accumulators)[kCount]) const {
    const bool is_gated = epilogue_.activation.is_gated;
    const float* const bias = epilogue_.bias + int64_t{at_.group} * columns_ * (is_gated ? 2 : 1);
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const bool is_up = is_gated && i >= kCount / 2;
      const int column = at_.n + threadIdx.x % 4 * 2 + 2 * i - (is_up ? kCount : 0);
      if (column >= columns_) continue;
      const float2 pair = *reinterpret_cast<const float2*>(bias + column + (is_up ? columns_ : 0));
      accumulators[i] += pair.x;
      accumulators[i + 1] += pair.y;
      accumulators[i + 2] += pair.x;
      accumulators[i + 3] += pair.y;
    }
  }

  const EpilogueParams& epilogue_;
  const int columns_;
  const MatmulTensorMaps& maps_;
  const EpilogueStaging staging_;
  EpilogueCoordinates at_ = {};
  RowWeights weights_ = {};
  int half_ = kHalves;  // in the staging buffer; kHalves: all is done
  int slice_ = 0;       // next one of this half
  uint32_t words_[kSliceWords] = {};
  uint32_t up_words_[kSliceWords] = {};
  uint32_t kept_[kStagingWords] = {};  // the second half of the columns
};

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_ACTIVATION_CUH_
