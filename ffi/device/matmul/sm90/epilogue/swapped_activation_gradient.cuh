// Activation gradient epilogue of the matmuls with swapped operands (sm_90): from the gradient d of
// the activations without their row weights, and the pre-activation of the forward pass, it
// computes
//
//   pre_activation_gradient   the row weight times d, through the activation's derivative
//   out                       the row weight times the activations, recomputed
//   row_dots                  the dot product of the activations and d, per kColumnsPerDot columns
//
// A slice (swapped_slices.cuh) takes four rows of a box: eight lanes per row, 16 bytes per
// lane. It reads the pre-activation from memory, and replaces d in the staging buffer by the
// activations. Slices go from box to box, then to the next four rows.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_SWAPPED_ACTIVATION_GRADIENT_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_SWAPPED_ACTIVATION_GRADIENT_CUH_

#include "ffi/device/matmul/activation.cuh"
#include "ffi/device/matmul/sm90/epilogue/swapped_slices.cuh"
#include "ffi/device/matmul/sm90/tensor_maps.h"
#include "ffi/device/ptx/element_types.cuh"
#include "ffi/device/ptx/memory.cuh"
#include "ffi/device/ptx/shared_memory.cuh"

namespace jax_ep::sm90 {

template <typename T>
class SwappedActivationGradientEpilogue
    : public SwappedEpilogueSlices<T, SwappedActivationGradientEpilogue<T>> {
  using Slices = SwappedEpilogueSlices<T, SwappedActivationGradientEpilogue<T>>;

 public:
  __device__ SwappedActivationGradientEpilogue(const MatmulParams& params,
                                               const MatmulTensorMaps& maps,
                                               const Pipeline& pipeline, int warp)
      : Slices(pipeline, warp),
        epilogue_(params.epilogue),
        columns_(params.shape_n),
        pre_columns_(columns_ * (params.epilogue.activation.is_gated ? 2 : 1)),
        out_map_(&maps.out) {}

  // Called with the tile's place.
  __device__ void Store(const MatmulParams& /*params*/, const EpilogueCoordinates& at,
                        int /*num_warpgroups*/, const float (&accumulators)[kAccumulators]) {
    Slices::Begin(at, accumulators);
    PrefetchPreActivation(0);
    PrefetchPreActivation(kSwappedBufferRows);
  }

 private:
  friend Slices;
  using Slices::at_;
  using Slices::end_slice_;
  using Slices::slice_;
  using Slices::staging_;

  static_assert(kSwappedColumns == kColumnsPerDot, "a tile's columns make one entry of row_dots");

  // A slice's shape.
  static constexpr int kLaneWords = 4;
  static constexpr int kLaneElements = 2 * kLaneWords;
  static constexpr int kRowLanes = kColumnBlock / kLaneElements;
  static constexpr int kSliceRows = 32 / kRowLanes;

  __device__ static int FirstSlice() { return 0; }
  __device__ int Box() const { return slice_ % kStagingBoxes; }
  __device__ int SliceRow() const { return slice_ / kStagingBoxes * kSliceRows; }
  __device__ int LaneRow() const { return SliceRow() + threadIdx.x % 32 / kRowLanes; }

  // Rows that the tile does not have take no slices.
  __device__ void BeginHalf() {
    end_slice_ = CeilDivide(min(max(at_.num_m, 0), kWarpM), kSliceRows) * kStagingBoxes;
  }

  __device__ void Load() {
    const int row = LaneRow();
    const int column = at_.n + Box() * kColumnBlock + threadIdx.x % kRowLanes * kLaneElements;
    is_inside_ = row < at_.num_m && column < columns_;
#pragma unroll
    for (int i = 0; i < kLaneWords; ++i) gate_words_[i] = up_words_[i] = 0;
    weight_ = 1.0f;
    if (!is_inside_) return;
    const int m = at_.m + row;
    index_ = int64_t{m} * pre_columns_ + column;
    const uint16_t* const from = PreActivation() + index_;
    PrefetchNextSlice(row, from);
    LoadGlobal(from, gate_words_);
    if (epilogue_.activation.is_gated) LoadGlobal(from + columns_, up_words_);
    if (epilogue_.row_weights != nullptr) weight_ = epilogue_.row_weights[m];
  }

  __device__ void Run() {
    if (slice_ == 0) staging_.WaitUntilStaged();
    SpecializeForActivation(epilogue_.activation, [&]<bool kIsGated, bool kIsSmooth>() {
      ComputeGradients<kIsGated, kIsSmooth>();
    });
  }

  __device__ void StoreRows() const { staging_.Rows().template Store<2>(out_map_, PrefixBox(at_)); }

  __device__ const uint16_t* PreActivation() const {
    return static_cast<const uint16_t*>(epilogue_.pre_activation);
  }

  // Prefetches the pre-activation of 16 rows, which slices will read, to L2: a cache line per lane,
  // or two.
  __device__ void PrefetchPreActivation(int first_row) const {
    constexpr int kCacheLineElements = 64;
    constexpr int kRowCacheLines = kSwappedColumns / kCacheLineElements;
    const int lane = threadIdx.x % 32;
    const int n = at_.n + lane % kRowCacheLines * kCacheLineElements;
    const int row = first_row + lane / kRowCacheLines;
    static_assert(kWarpM == 32 / kRowCacheLines, "a lane has one line of 16 rows");
    if (n >= columns_ || row >= at_.num_m) return;
    for (int half = 0; half < (epilogue_.activation.is_gated ? 2 : 1); ++half) {
      const int64_t index = int64_t{at_.m + row} * pre_columns_ + half * columns_ + n;
      PrefetchToL2(PreActivation() + index);
    }
  }

  // Prefetches what the next slice will load to L1. `from` is what this lane just loaded, of `row`.
  __device__ void PrefetchNextSlice(int row, const uint16_t* from) const {
    const bool has_same_rows = Box() + 1 < kStagingBoxes;
    if (threadIdx.x % kRowLanes != 0) return;  // one lane per cache line
    const bool is_inside =
        has_same_rows ? at_.n + kColumnBlock < columns_ : row + kSliceRows < at_.num_m;
    if (!is_inside) return;
    from += has_same_rows ? int64_t{kColumnBlock}
                          : int64_t{kSliceRows} * pre_columns_ - Box() * kColumnBlock;
    PrefetchToL1(from);
    if (epilogue_.activation.is_gated) PrefetchToL1(from + columns_);
  }

  // Replaces d in the staging buffer by weighted activations, and stores the gradients and dots.
  template <bool kIsGated, bool kIsSmooth>
  __device__ void ComputeGradients() {
    const ActivationFunction& f = epilogue_.activation;
    const uint32_t staged = staging_.Rows().LaneVector(Box(), SliceRow());
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
    if (Box() == 0) {
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
    const int row = LaneRow();
    // The second tile of a pair may begin past the last column.
    if (threadIdx.x % kRowLanes == 0 && row < at_.num_m && at_.n < columns_) {
      const int num_dots = CeilDivide(columns_, kColumnsPerDot);
      epilogue_.row_dots[int64_t{at_.m + row} * num_dots + at_.n / kColumnsPerDot] = dot;
    }
  }

  __device__ static void StoreWords(uint16_t* to, const uint32_t (&words)[kLaneWords]) {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  }

  const EpilogueParams& epilogue_;
  const int columns_;
  const int pre_columns_;  // columns of the pre-activation
  const void* const out_map_;
  bool is_inside_ = false;  // the slice has valid elements for this lane
  int64_t index_ = 0;       // this lane's first element of the slice's pre-activation
  uint32_t gate_words_[kLaneWords] = {};
  uint32_t up_words_[kLaneWords] = {};
  float weight_ = 1.0f;
  float dot_ = 0;  // box 0's part
};

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_SWAPPED_ACTIVATION_GRADIENT_CUH_
