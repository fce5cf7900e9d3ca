// Activation gradient epilogue (sm_90): from 16 x 256 accumulators, the gradient d of the
// activations without their row weights, and the pre-activation of the forward pass, one warp
// computes
//
//   pre_activation_gradient   the row weight times d, through the activation's derivative
//   out                       the row weight times the activations, recomputed
//   row_dots                  the dot product of the activations and d, per kColumnsPerDot columns
//
// At the end of a tile d is rounded to 16 bits, half of its columns into the staging buffer and
// half into registers. Each slice (epilogue.cuh) takes four rows of a box: eight lanes per row, 16
// bytes per lane. It reads the pre-activation from memory, and replaces d in the staging buffer by
// the activations. Slices go from box to box, then to the next four rows.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_ACTIVATION_GRADIENT_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_ACTIVATION_GRADIENT_CUH_

#include "ffi/device/matmul/activation.cuh"
#include "ffi/device/matmul/sm90/epilogue_staging.cuh"
#include "ffi/device/matmul/sm90/tensor_maps.h"
#include "ffi/device/ptx/element_types.cuh"
#include "ffi/device/ptx/shared_memory.cuh"

namespace jax_ep::sm90 {

template <typename T>
class ActivationGradientEpilogue {
 public:
  __device__ ActivationGradientEpilogue(const MatmulParams& params, const MatmulTensorMaps& maps,
                                        uint32_t staging)
      : epilogue_(params.epilogue),
        columns_(params.shape_n),
        pre_columns_(columns_ * (params.epilogue.activation.is_gated ? 2 : 1)),
        out_map_(&maps.out),
        staging_(staging) {}

  __device__ void Store(const MatmulParams& /*params*/, const EpilogueCoordinates& at,
                        const float (&accumulators)[kAccumulators]) {
    at_ = at;
    const int row = threadIdx.x % 32 / kRowLanes;
    const int column = threadIdx.x % kRowLanes * kLaneElements;
    first_index_ = int64_t{at.m + row} * pre_columns_ + at.n + column;
    num_rows_ = at.num_m - row;
    num_columns_ = columns_ - at.n - column;
    uint32_t words[kStagingWords];
    PackHalf<T>(accumulators, 0, words);
    staging_.Replace(words);
    PackHalf<T>(accumulators, 1, kept_);
    slice_ = 0;
    PrefetchPreActivation();
  }

  __device__ void LoadSlice() {
    if (slice_ == 2 * kHalfSlices) return;
    const int row = SliceRow();
    const int column = SliceColumn();
    is_inside_ = row < num_rows_ && column < num_columns_;
#pragma unroll
    for (int i = 0; i < kLaneWords; ++i) gate_words_[i] = up_words_[i] = 0;
    weight_ = 1.0f;
    if (!is_inside_) return;
    index_ = first_index_ + (int64_t{row} * pre_columns_ + column);
    const uint16_t* const from = PreActivation() + index_;
    LoadWords(from, gate_words_);
    if (epilogue_.activation.is_gated) LoadWords(from + columns_, up_words_);
    if (epilogue_.row_weights != nullptr) {
      weight_ = epilogue_.row_weights[at_.m + row + threadIdx.x % 32 / kRowLanes];
    }
  }

  __device__ void RunSlice(int /*k*/ = 0) {
    if (slice_ == 2 * kHalfSlices) return;
    if (slice_ == kHalfSlices) staging_.Replace(kept_);
    SpecializeForActivation(epilogue_.activation, [&]<bool kIsGated, bool kIsSmooth>() {
      ComputeGradients<kIsGated, kIsSmooth>();
    });
    ++slice_;
    if (slice_ % kHalfSlices == 0) {
      staging_.Store<2>(out_map_, PrefixBox(at_));
      at_.n += kHalfN;
    }
  }

  __device__ void Finish() {
#pragma unroll 1
    while (slice_ < 2 * kHalfSlices) {
      LoadSlice();
      RunSlice();
    }
  }

  __device__ void Close() { staging_.WaitUntilComplete(); }

 private:
  static_assert(kHalfN == kColumnsPerDot, "half of a tile's columns make one entry of row_dots");

  // A slice's shape.
  static constexpr int kLaneWords = 4;
  static constexpr int kLaneElements = 2 * kLaneWords;
  static constexpr int kRowLanes = kColumnBlock / kLaneElements;
  static constexpr int kSliceRows = 32 / kRowLanes;
  static constexpr uint32_t kHalfSlices = kWarpM / kSliceRows * kStagingBoxes;  // half the columns

  __device__ int SliceRow() const { return slice_ / kStagingBoxes * kSliceRows % kWarpM; }
  __device__ int SliceColumn() const {
    return slice_ / kHalfSlices * kHalfN + slice_ % kStagingBoxes * (kHalfN / kStagingBoxes);
  }

  __device__ const uint16_t* PreActivation() const {
    return static_cast<const uint16_t*>(epilogue_.pre_activation);
  }

  // Prefetches the pre-activation that LoadSlice will read to L2, about one cache line per lane.
  __device__ void PrefetchPreActivation() const {
    constexpr int kCacheLineElements = 64;
    constexpr int kRowCacheLines = kTileN / kCacheLineElements;
    const int lane = threadIdx.x % 32;
    const int n = at_.n + lane % kRowCacheLines * kCacheLineElements;
    if (n >= columns_) return;
    for (int half = 0; half < (epilogue_.activation.is_gated ? 2 : 1); ++half) {
      for (int row = lane / kRowCacheLines; row < min(at_.num_m, kWarpM);
           row += 32 / kRowCacheLines) {
        const int64_t index = int64_t{at_.m + row} * pre_columns_ + half * columns_ + n;
        asm volatile("prefetch.global.L2 [%0];" ::"l"(PreActivation() + index) : "memory");
      }
    }
  }

  // Replaces d in the staging buffer by weighted activations, and stores the gradients and dots.
  template <bool kIsGated, bool kIsSmooth>
  __device__ void ComputeGradients() {
    const ActivationFunction& f = epilogue_.activation;
    const uint32_t staged = staging_.LaneVector(slice_ % kStagingBoxes, SliceRow());
    const uint4 vector = LoadShared(staged);
    uint32_t words[kLaneWords] = {vector.x, vector.y, vector.z, vector.w};
    float dot = 0;
#pragma unroll
    for (int i = 0; i < kLaneWords; ++i) {
      float d[2], gate[2], up[2] = {1, 1};
      T::Unpack(words[i], d);
      T::Unpack(gate_words_[i], gate);
      if constexpr (kIsGated) T::Unpack(up_words_[i], up);
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const ActivationResult f_gate = ActivateFast<kIsSmooth>(f, gate[x]);
        const float activated = f_gate.value * up[x];
        const float weighted = weight_ * d[x];
        dot += activated * d[x];
        d[x] = weight_ * activated;
        gate[x] = weighted * up[x] * f_gate.derivative;
        up[x] = weighted * f_gate.value;
      }
      words[i] = T::Pack(d);
      gate_words_[i] = T::Pack(gate);
      if constexpr (kIsGated) up_words_[i] = T::Pack(up);
    }
    StoreShared(staged, make_uint4(words[0], words[1], words[2], words[3]));
    if (is_inside_) {
      uint16_t* const to = static_cast<uint16_t*>(epilogue_.pre_activation_gradient) + index_;
      StoreWords(to, gate_words_);
      if constexpr (kIsGated) StoreWords(to + columns_, up_words_);
    }
    if (slice_ % kStagingBoxes == 0) {
      dot_ = dot;
    } else {
      StoreDot(dot_ + dot);
    }
  }

  // Reduces the lanes' parts of each row's dot product, and stores it.
  __device__ void StoreDot(float dot) const {
#pragma unroll
    for (int lanes = 1; lanes < kRowLanes; lanes *= 2) {
      dot += __shfl_xor_sync(0xffffffffu, dot, lanes);
    }
    if (threadIdx.x % kRowLanes != 0) return;
    const int row = SliceRow();
    const int num_dots = CeilDivide(columns_, kColumnsPerDot);
    const int dot_index = at_.n / kColumnsPerDot;
    if (row < num_rows_ && dot_index < num_dots) {
      const int64_t m = at_.m + row + threadIdx.x % 32 / kRowLanes;
      epilogue_.row_dots[m * num_dots + dot_index] = dot;
    }
  }

  // Volatile, so that the compiler does not move the load down to where the words are used.
  __device__ static void LoadWords(const uint16_t* from, uint32_t (&words)[kLaneWords]) {
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(from)
                 : "memory");
  }

  __device__ static void StoreWords(uint16_t* to, const uint32_t (&words)[kLaneWords]) {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  }

  const EpilogueParams& epilogue_;
  const int columns_;
  const int pre_columns_;  // columns of the pre-activation
  const void* const out_map_;
  const EpilogueStaging staging_;
  EpilogueCoordinates at_ = {};  // the half in the staging buffer
  int64_t first_index_ = 0;      // this lane's first element of the pre-activation
  int num_rows_ = 0;             // valid ones from there on
  int num_columns_ = 0;
  uint32_t slice_ = 2 * kHalfSlices;  // next one, through both halves of the columns
  int64_t index_ = 0;                 // the slice's first element of the pre-activation
  bool is_inside_ = false;            // the slice has valid elements for this lane
  uint32_t gate_words_[kLaneWords] = {};
  uint32_t up_words_[kLaneWords] = {};
  float weight_ = 1.0f;
  float dot_ = 0;                      // box 0's part
  uint32_t kept_[kStagingWords] = {};  // the second half of the columns
};

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_ACTIVATION_GRADIENT_CUH_
