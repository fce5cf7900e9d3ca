// What a warp makes of 16 rows of sums on their way to memory: activations (sm_90).
//
// A tile's end only rounds the sums to 16 bits, half of them into the stage. The rest comes in
// steps between the matrix instructions of the next tile, as the two have different units; it takes
// its words from the stage, so that the sums have the registers.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_ACTIVATION_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_ACTIVATION_CUH_

#include "ffi/device/matmul/activation.cuh"
#include "ffi/device/matmul/sm90/epilogue_staging.cuh"
#include "ffi/device/matmul/sm90/tensor_map.h"
#include "ffi/device/ptx/element_types.cuh"
#include "ffi/device/ptx/tma.cuh"

namespace jax_ep {

// The weights of a lane's two rows.
struct RowWeights {
  float of[2];

  __device__ void Read(const float* weights, const EpilogueCoordinates& place) {
    for (int half = 0; half < 2; ++half) {
      const int m = threadIdx.x % 32 / 4 + 8 * half;
      of[half] = weights != nullptr && m < place.num_m ? weights[place.m + m] : 1.0f;
    }
  }
};

// Of kActivation. Of gated sums the first half of the columns is the gate; the stage then has 64
// columns of the gate and beside them those that they multiply.
template <typename T>
class ActivationEpilogue {
 public:
  __device__ ActivationEpilogue(const MatmulProblem& problem, const MatmulTensorMaps& maps,
                                uint32_t staging)
      : epilogue_(problem.epilogue), columns_(problem.num_n), maps_(maps), stage_(staging) {}

  __device__ void Store(const EpilogueCoordinates& place, float (&sums)[kResultN / 2]) {
    place_ = place;
    weights_.Read(epilogue_.row_weights, place);
    if (epilogue_.bias != nullptr) AddBias(sums);
    if (epilogue_.activation.is_identity && epilogue_.row_weights != nullptr) {
      // Rounded once: the weight comes before.
#pragma unroll
      for (int i = 0; i < kResultN / 2; ++i) sums[i] *= weights_.of[i / 2 % 2];
    }
    // One branch instead of a choice for each sum: the matrix units wait meanwhile.
    if (epilogue_.activation.is_gated) {
      Round<true>(sums);
    } else {
      Round<false>(sums);
    }
    half_ = 0;
    step_ = 0;
  }

  // The first half of a step: reads what Continue needs of the stage.
  __device__ void Load() {
    if (half_ == 2 || step_ == 0) return;
    const int word = (step_ - 1) * kWordsPerStep;
    stage_.ReadWords(word, words_);
    if (epilogue_.activation.is_gated) stage_.ReadWords(kBoxWords + word, ups_);
  }

  __device__ void Continue() {
    if (half_ == 2) return;
    const ActivationFunction& f = epilogue_.activation;
    const bool keeps = epilogue_.pre_activation != nullptr;
    if (step_ == 0) {
      if (half_ == 1) stage_.Replace(kept_);
      if (keeps) SendPreActivations();
    } else {
      if (step_ == 1 && keeps) stage_.Wait();
      const int word = (step_ - 1) * kWordsPerStep;
      MakeByKind(f, [&]<bool kIsGated, bool kIsSmooth>() { Make<kIsGated, kIsSmooth>(word); });
    }
    if (++step_ <= NumWords() / kWordsPerStep) return;
    stage_.Send<2>(&maps_.out, BoxOfRows(place_), f.is_gated ? 1 : kStagedBoxes);
    place_.n += f.is_gated ? kStagedColumns / 2 : kStagedColumns;
    step_ = 0;
    ++half_;
  }

  // To be called before the next Store.
  __device__ void Finish() {
#pragma unroll 1
    while (half_ < 2) {
      Load();
      Continue();
    }
  }

  // To be called last, after Finish.
  __device__ void Close() { stage_.Close(); }

 private:
  static constexpr int kStagedColumns = kResultN / 2;
  static constexpr int kWordsPerStep = 4;

  // To be made, of a half.
  __device__ int NumWords() const {
    const ActivationFunction& f = epilogue_.activation;
    return f.is_identity ? 0 : f.is_gated ? kBoxWords : kStagedWords;
  }

  // One half into the stage, the other into kept_.
  template <bool kIsGated>
  __device__ void Round(const float (&sums)[kResultN / 2]) {
    const auto round = [&](int half, uint32_t (&words)[kStagedWords]) {
#pragma unroll
      for (int i = 0; i < kStagedWords; ++i) {
        // Boxes 0 and 2 of the sums' four with box 1 and 3, or each with its neighbour.
        const int gated = (i / kBoxWords * 2 + half) * kBoxWords + i % kBoxWords;
        const int plain = half * kStagedWords + i;
        words[i] = T::Pack(sums + 2 * (kIsGated ? gated : plain));
      }
    };
    uint32_t words[kStagedWords];
    round(0, words);
    stage_.Replace(words);
    round(1, kept_);
  }

  __device__ void SendPreActivations() const {
    const TmaCoordinates at = BoxOfRows(place_);
    if (!epilogue_.activation.is_gated) return stage_.Send<2>(maps_.pre_activation, at);
    for (int box = 0; box < kStagedBoxes; ++box) {
      stage_.Send<2>(&maps_.pre_activation[box], at, 1, box);
    }
  }

  // Words in the place of those that they are made of.
  template <bool kIsGated, bool kIsSmooth>
  __device__ void Make(uint32_t first) {
    const ActivationFunction& f = epilogue_.activation;
#pragma unroll
    for (int i = 0; i < kWordsPerStep; ++i) {
      float values[2], up[2];
      T::Unpack(words_[i], values);
      if constexpr (kIsGated) T::Unpack(ups_[i], up);
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        float value = ActivateFast<kIsSmooth>(f, values[x]).value;
        if constexpr (kIsGated) value *= up[x];
        values[x] = weights_.of[i % 2] * value;
      }
      words_[i] = T::Pack(values);
    }
    stage_.WriteWords(first, words_);
  }

  __device__ void AddBias(float (&sums)[kResultN / 2]) const {
    const bool is_gated = epilogue_.activation.is_gated;
    const float* const bias =
        epilogue_.bias + int64_t{place_.group} * columns_ * (is_gated ? 2 : 1);
#pragma unroll
    for (int i = 0; i < kResultN / 2; i += 4) {
      const bool is_up = is_gated && i >= kResultN / 4;
      const int column = place_.n + threadIdx.x % 4 * 2 + 2 * i - (is_up ? kResultN / 2 : 0);
      if (column >= columns_) continue;
      const float2 pair = *reinterpret_cast<const float2*>(bias + column + (is_up ? columns_ : 0));
      sums[i] += pair.x;
      sums[i + 1] += pair.y;
      sums[i + 2] += pair.x;
      sums[i + 3] += pair.y;
    }
  }

  const EpilogueParams& epilogue_;
  const int columns_;
  const MatmulTensorMaps& maps_;
  const EpilogueStaging stage_;
  EpilogueCoordinates place_ = {};
  RowWeights weights_ = {};
  int half_ = 2;  // that the stage has; 2: all is done
  int step_ = 0;  // of this half: the first prepares, the others make words
  uint32_t words_[kWordsPerStep] = {};
  uint32_t ups_[kWordsPerStep] = {};
  uint32_t kept_[kStagedWords] = {};
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_ACTIVATION_CUH_
