// Activation epilogue of the matmuls with swapped operands (sm_90): a bias, an activation, and row
// weights.
//
// The columns of a tile, or of each half of a wide one, are 128 of the pre-activation, or 64 gate
// columns, which the first warpgroup has (not of a wide tile), and their 64 up columns.
// Accumulators are rounded to the 16-bit pre-activation. Slices (swapped_slices.cuh) store
// it, if it is kept, and replace it by the activations.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_SWAPPED_ACTIVATION_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_SWAPPED_ACTIVATION_CUH_

#include "ffi/device/matmul/activation.cuh"
#include "ffi/device/matmul/sm90/epilogue/row_weights.cuh"
#include "ffi/device/matmul/sm90/epilogue/swapped_slices.cuh"
#include "ffi/device/matmul/sm90/tensor_maps.h"
#include "ffi/device/ptx/element_types.cuh"
#include "ffi/device/ptx/tma.cuh"

namespace jax_ep::sm90 {

// With GateLimits the activation is gated, or there is none.
template <typename T, typename Limits = NoLimits>
class SwappedActivationEpilogue
    : public SwappedEpilogueSlices<T, SwappedActivationEpilogue<T, Limits>> {
  using Slices = SwappedEpilogueSlices<T, SwappedActivationEpilogue<T, Limits>>;

 public:
  static constexpr bool kEndsFirstHalf = kHasLimits<Limits>;

  __device__ SwappedActivationEpilogue(const MatmulParams& params, const MatmulTensorMaps& maps,
                                       const Pipeline& pipeline, int warp,
                                       const Limits& limits = {})
      : Slices(pipeline, warp),
        epilogue_(params.epilogue),
        columns_(params.shape_n),
        maps_(maps),
        limits_(limits),
        accumulator_weights_(pipeline) {}

  __device__ void BeginTile(const Tile& tile) const {
    if (MultipliesAccumulators()) accumulator_weights_.Load(epilogue_.row_weights, tile);
  }

  // Called with the tile's place. It has at most kRows rows.
  template <int kRows = kSwappedRows>
  __device__ void Store(const MatmulParams& /*params*/, const EpilogueCoordinates& at,
                        int /*num_warpgroups*/, float (&accumulators)[kAccumulators]) {
    if (at.second_half_columns > 0) {
      if (epilogue_.bias != nullptr) AddBiasOfWide(at, accumulators);
      if (MultipliesAccumulators()) accumulator_weights_.MultiplyWide(accumulators, warp_);
    } else {
      if (epilogue_.bias != nullptr) AddBias<kRows>(at, accumulators);
      if (MultipliesAccumulators()) accumulator_weights_.Multiply<kRows>(accumulators);
    }
    Slices::Begin(at, accumulators);
  }

 private:
  friend Slices;
  using Slices::at_;
  using Slices::end_slice_;
  using Slices::slice_;
  using Slices::staging_;
  using Slices::warp_;

  static constexpr int kSliceWords = 4;

  // Without an activation the result is rounded once, so the weights come before rounding.
  __device__ bool MultipliesAccumulators() const {
    return epilogue_.activation.is_identity && epilogue_.row_weights != nullptr;
  }

  // Slice 0 stores the pre-activation, if it is kept. The others compute kSliceWords words of
  // activations each. A warp whose rows the tile does not have takes none.
  __device__ bool KeepsPreActivation() const { return epilogue_.pre_activation != nullptr; }
  __device__ int FirstSlice() const {
    return KeepsPreActivation() || epilogue_.activation.is_identity ? 0 : 1;
  }

  __device__ void BeginHalf() {
    weights_.Load(epilogue_.row_weights, at_);
    const ActivationFunction& f = epilogue_.activation;
    const bool has_slices = at_.num_m > 0 || Slices::HasAllSlices();
    end_slice_ = !has_slices     ? FirstSlice()
                 : f.is_identity ? 1
                                 : 1 + (f.is_gated ? kBoxWords : kStagingWords) / kSliceWords;
  }

  __device__ void Load() {
    if (slice_ == 0) return;
    if (slice_ == 1 && !KeepsPreActivation()) staging_.WaitUntilStaged();
    const int word = (slice_ - 1) * kSliceWords;
    staging_.Rows().ReadWords(word, words_);
    if (epilogue_.activation.is_gated) staging_.Rows().ReadWords(kBoxWords + word, up_words_);
  }

  __device__ void Run() {
    if (slice_ == 0) {
      staging_.WaitUntilStaged();
      if (KeepsPreActivation()) StorePreActivation();
      Slices::Delay(2);
    } else {
      if (slice_ == 1 && KeepsPreActivation()) EpilogueStaging<>::WaitUntilRead();
      const int word = (slice_ - 1) * kSliceWords;
      if constexpr (kHasLimits<Limits>) {
        ActivateWords<true, true>(word);
      } else {
        SpecializeForActivation(epilogue_.activation, [&]<bool kIsGated, bool kIsSmooth>() {
          ActivateWords<kIsGated, kIsSmooth>(word);
        });
      }
    }
  }

  __device__ void StoreRows() const {
    staging_.Rows().template Store<2>(&maps_.out, PrefixBox(at_),
                                      epilogue_.activation.is_gated ? 1 : kStagingBoxes);
  }

  __device__ void StorePreActivation() const {
    const TmaCoordinates box = PrefixBox(at_);
    if (!epilogue_.activation.is_gated)
      return staging_.Rows().template Store<2>(maps_.pre_activation, box);
    for (int i = 0; i < kStagingBoxes; ++i) {
      staging_.Rows().template Store<2>(&maps_.pre_activation[i], box, 1, i);
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
        if constexpr (kIsGated) LimitGate(limits_, &values[x], &up[x]);
        float value = ActivateFast<kIsSmooth>(f, values[x]).value;
        if constexpr (kIsGated) value *= up[x];
        values[x] = weights_.values[i % 2] * value;
      }
      words_[i] = T::Pack(values);
    }
    staging_.Rows().WriteWords(first_word, words_);
  }

  template <int kRows>
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
      for (int j = 0; j < kRows / 8; ++j) {
        accumulators[4 * j + 2 * h] += value;
        accumulators[4 * j + 2 * h + 1] += value;
      }
    }
  }

  // The same of a wide tile: accumulators[4 * j + 2 * h + i] of lane l is column 8 * (j % 16) +
  // 2 * (l % 4) + i of a half of the columns.
  __device__ void AddBiasOfWide(const EpilogueCoordinates& at,
                                float (&accumulators)[kAccumulators]) const {
    const bool is_gated = epilogue_.activation.is_gated;
    const float* const bias = epilogue_.bias + int64_t{at.group} * columns_ * (is_gated ? 2 : 1);
#pragma unroll
    for (int j = 0; j < kAccumulators / 4; ++j) {
      const int within = 8 * (j % 16);
      const bool is_up = is_gated && within >= kColumnBlock;
      const int column = at.n + j / 16 * at.second_half_columns + within -
                         (is_up ? kColumnBlock : 0) + threadIdx.x % 4 * 2;
      if (column >= columns_) continue;
      const float* const values = bias + column + (is_up ? columns_ : 0);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float value = values[i];
        accumulators[4 * j + i] += value;
        accumulators[4 * j + 2 + i] += value;
      }
    }
  }

  const EpilogueParams& epilogue_;
  const int columns_;
  const MatmulTensorMaps& maps_;
  [[no_unique_address]] const Limits limits_;
  SwappedRowWeights accumulator_weights_;
  RowWeights weights_ = {};
  uint32_t words_[kSliceWords] = {};
  uint32_t up_words_[kSliceWords] = {};
};

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_SWAPPED_ACTIVATION_CUH_
