// What a warp makes of 16 rows of sums on their way to memory: the gradient of an activation
// (sm_90). In steps between the matrix instructions of the next tile, as in fused_rows.cuh.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_ACTIVATION_GRADIENT_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_ACTIVATION_GRADIENT_CUH_

#include "ffi/device/matmul/sm90/epilogue_activation.cuh"
#include "ffi/device/matmul/sm90/tensor_map.h"
#include "ffi/device/ptx/shared_memory.cuh"

namespace jax_ep {

// Of kActivationGradient: sums are gradients of the hidden rows, without their weight. The hidden
// rows take their place.
//
// A step takes four rows of a box, eight lanes the 128 bytes of a row. Steps go from box to box,
// then to the next rows.
template <typename T>
class ActivationGradientEpilogue {
 public:
  __device__ ActivationGradientEpilogue(const MatmulProblem& problem, const MatmulTensorMaps& maps,
                                        uint32_t staging)
      : epilogue_(problem.epilogue),
        columns_(problem.num_n),
        pitch_(columns_ * (problem.epilogue.activation.is_gated ? 2 : 1)),
        out_map_(&maps.out),
        stage_(staging) {}

  __device__ void Store(const EpilogueCoordinates& place, const float (&sums)[kResultN / 2]) {
    place_ = place;
    const int row = threadIdx.x % 32 / kLanes;
    const int column = threadIdx.x % kLanes * kElements;
    first_ = int64_t{place.m + row} * pitch_ + place.n + column;
    num_rows_ = place.num_m - row;
    num_columns_ = columns_ - place.n - column;
    uint32_t words[kStagedWords];
#pragma unroll
    for (int i = 0; i < kStagedWords; ++i) words[i] = T::Pack(sums + 2 * i);
    stage_.Replace(words);
#pragma unroll
    for (int i = 0; i < kStagedWords; ++i) kept_[i] = T::Pack(sums + 2 * kStagedWords + 2 * i);
    step_ = 0;
    Prefetch();
  }

  // The first half of a step: asks for what Continue needs of memory.
  __device__ void Load() {
    if (step_ == 2 * kSteps) return;
    const int row = Row();
    const int column = Column();
    is_there_ = row < num_rows_ && column < num_columns_;
#pragma unroll
    for (int i = 0; i < kWords; ++i) gates_[i] = ups_[i] = 0;
    weight_ = 1.0f;
    if (!is_there_) return;
    at_ = first_ + (int64_t{row} * pitch_ + column);
    const uint16_t* const from = PreActivations() + at_;
    ReadWords(from, gates_);
    if (epilogue_.activation.is_gated) ReadWords(from + columns_, ups_);
    if (epilogue_.row_weights != nullptr) {
      weight_ = epilogue_.row_weights[place_.m + row + threadIdx.x % 32 / kLanes];
    }
  }

  __device__ void Continue() {
    if (step_ == 2 * kSteps) return;
    if (step_ == kSteps) stage_.Replace(kept_);
    MakeByKind(epilogue_.activation,
               [&]<bool kIsGated, bool kIsSmooth>() { Make<kIsGated, kIsSmooth>(); });
    ++step_;
    if (step_ % kSteps == 0) {
      stage_.Send<2>(out_map_, BoxOfRows(place_));
      place_.n += kHalfColumns;
    }
  }

  // To be called before the next Store.
  __device__ void Finish() {
#pragma unroll 1
    while (step_ < 2 * kSteps) {
      Load();
      Continue();
    }
  }

  // To be called last, after Finish.
  __device__ void Close() { stage_.Close(); }

 private:
  static constexpr int kHalfColumns = kResultN / 2;
  static_assert(kHalfColumns == kColumnsPerDot);

  static constexpr int kWords = 4;  // of a lane, in a step
  static constexpr int kElements = 2 * kWords;
  static constexpr int kLanes = kStagedLine / 2 / kElements;
  static constexpr int kRows = 32 / kLanes;
  static constexpr uint32_t kSteps = kResultM / kRows * kStagedBoxes;  // of half the columns

  __device__ int Row() const { return step_ / kStagedBoxes * kRows % kResultM; }
  __device__ int Column() const {
    return step_ / kSteps * kHalfColumns + step_ % kStagedBoxes * (kHalfColumns / kStagedBoxes);
  }

  __device__ const uint16_t* PreActivations() const {
    return static_cast<const uint16_t*>(epilogue_.pre_activation);
  }

  // The pre-activations that Load will read, to L2: a line a lane, or about one.
  __device__ void Prefetch() const {
    constexpr int kLines = kResultN * 2 / kStagedLine;  // of a row
    const int lane = threadIdx.x % 32;
    const int n = place_.n + lane % kLines * (kStagedLine / 2);
    if (n >= columns_) return;
    for (int half = 0; half < (epilogue_.activation.is_gated ? 2 : 1); ++half) {
      for (int row = lane / kLines; row < min(place_.num_m, kResultM); row += 32 / kLines) {
        const int64_t at = int64_t{place_.m + row} * pitch_ + half * columns_ + n;
        asm volatile("prefetch.global.L2 [%0];" ::"l"(PreActivations() + at) : "memory");
      }
    }
  }

  // Elements in the place of those that they are made of.
  template <bool kIsGated, bool kIsSmooth>
  __device__ void Make() {
    const ActivationFunction& f = epilogue_.activation;
    const uint32_t staged = stage_.ChunkOfLane(step_ % kStagedBoxes, Row());
    const uint4 chunk = LoadShared(staged);
    uint32_t words[kWords] = {chunk.x, chunk.y, chunk.z, chunk.w};
    float dot = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      float d[2], gate[2], up[2] = {1, 1};
      T::Unpack(words[i], d);
      T::Unpack(gates_[i], gate);
      if constexpr (kIsGated) T::Unpack(ups_[i], up);
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const Activated a = ActivateFast<kIsSmooth>(f, gate[x]);
        const float hidden = a.value * up[x];
        const float weighted = weight_ * d[x];
        dot += hidden * d[x];
        d[x] = weight_ * hidden;
        gate[x] = weighted * up[x] * a.slope;
        up[x] = weighted * a.value;
      }
      words[i] = T::Pack(d);
      gates_[i] = T::Pack(gate);
      if constexpr (kIsGated) ups_[i] = T::Pack(up);
    }
    StoreShared(staged, make_uint4(words[0], words[1], words[2], words[3]));
    if (is_there_) {
      uint16_t* const to = static_cast<uint16_t*>(epilogue_.gradient) + at_;
      WriteWords(to, gates_);
      if constexpr (kIsGated) WriteWords(to + columns_, ups_);
    }
    if (step_ % kStagedBoxes == 0) {
      dot_ = dot;
    } else {
      WriteDot(dot_ + dot);
    }
  }

  // Of a row, whose lanes have a part each.
  __device__ void WriteDot(float dot) const {
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2) {
      dot += __shfl_xor_sync(0xffffffffu, dot, lanes);
    }
    if (threadIdx.x % kLanes != 0) return;
    const int row = Row();
    const int num_blocks = CeilDivide(columns_, kColumnsPerDot);
    const int block = place_.n / kColumnsPerDot;
    if (row < num_rows_ && block < num_blocks) {
      const int64_t m = place_.m + row + threadIdx.x % 32 / kLanes;
      epilogue_.row_dots[m * num_blocks + block] = dot;
    }
  }

  // Volatile: loaded where it stands, not where it is used.
  __device__ static void ReadWords(const uint16_t* from, uint32_t (&words)[kWords]) {
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(from)
                 : "memory");
  }

  __device__ static void WriteWords(uint16_t* to, const uint32_t (&words)[kWords]) {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  }

  const EpilogueParams& epilogue_;
  const int columns_;
  const int pitch_;  // of pre-activations
  const void* const out_map_;
  const EpilogueStaging stage_;
  EpilogueCoordinates place_ = {};  // of the half that the stage has
  int64_t first_ = 0;               // this lane's first pre-activations
  int num_rows_ = 0;                // to store, from there on
  int num_columns_ = 0;
  uint32_t step_ =
      2 * kSteps;          // the next; the stage has the first half of the columns, then the second
  int64_t at_ = 0;         // its pre-activations
  bool is_there_ = false;  // that there are any
  uint32_t gates_[kWords] = {};
  uint32_t ups_[kWords] = {};
  float weight_ = 1.0f;
  float dot_ = 0;
  uint32_t kept_[kStagedWords] = {};
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_ACTIVATION_GRADIENT_CUH_
