// What a warp makes of 16 rows of sums on their way to memory: the gradient of an activation
// (sm_90). In steps between the matrix instructions of the next tile, as in fused_rows.cuh.
#ifndef JAX_EP_DEVICE_GRADIENT_ROWS_CUH_
#define JAX_EP_DEVICE_GRADIENT_ROWS_CUH_

#include "ffi/device/fused_rows.cuh"

namespace jax_ep {

// Of kActivationGradient: sums are gradients of the hidden rows, without their weight. The hidden
// rows take their place.
template <typename T>
class GradientRows {
 public:
  __device__ GradientRows(const MatmulProblem& problem, const MatmulTensorMaps& /*maps*/,
                          const ResultMatrix& out, uint32_t staging)
      : epilogue_(problem.epilogue), out_(out), stage_(staging) {}

  __device__ void Store(const ResultPlace& place, int /*group*/,
                        const float (&sums)[kResultN / 2]) {
    place_ = place;
    uint32_t words[kStagedWords];
#pragma unroll
    for (int i = 0; i < kStagedWords; ++i) words[i] = T::Pack(sums + 2 * i);
    stage_.Replace(words);
#pragma unroll
    for (int i = 0; i < kStagedWords; ++i) kept_[i] = T::Pack(sums + 2 * kStagedWords + 2 * i);
    step_ = 0;
    Read();
  }

  __device__ void Continue() {
    if (step_ == 2 * kSteps) return;
    if (step_ == kSteps) stage_.Replace(kept_);
    if (epilogue_.activation.is_smooth) {
      Make<true>();
    } else {
      Make<false>();
    }
    ++step_;
    if (step_ % kSteps == 0) {
      ResultPlace place = place_;
      place.n += (step_ / kSteps - 1) * kHalfColumns;
      stage_.Send<2>(out_, place);
    }
    if (step_ < 2 * kSteps) Read();
  }

  // To be called before the next Store.
  __device__ void Finish() {
#pragma unroll 1
    while (step_ < 2 * kSteps) Continue();
  }

  __device__ void Close() {
    Finish();
    stage_.Close();
  }

 private:
  static constexpr int kHalfColumns = kResultN / 2;
  static_assert(kHalfColumns == kColumnsPerDot);

  // A step takes 4 rows of a box, eight lanes the 128 bytes of a row. Steps go from box to box, and
  // then to the next rows.
  static constexpr int kLanes = kStagedLine / 16;
  static constexpr int kSteps = kResultM / (32 / kLanes) * kStagedBoxes;  // of half the columns

  __device__ int Row() const {
    return step_ / kStagedBoxes * (32 / kLanes) % kResultM + threadIdx.x % 32 / kLanes;
  }
  __device__ int Chunk() const { return step_ % kStagedBoxes * kLanes + threadIdx.x % kLanes; }

  // Where this lane's pre-activations are, from the first row on; negative: nowhere.
  __device__ int At() const {
    const int row = Row();
    const int n = place_.n + step_ / kSteps * kHalfColumns + Chunk() * 8;
    const int pitch = epilogue_.activation.is_gated ? 2 * out_.num_n : out_.num_n;
    return row < place_.num_m && n < out_.num_n ? row * pitch + n : -1;
  }

  __device__ int64_t FirstRow() const {
    return int64_t{place_.m} * out_.num_n * (epilogue_.activation.is_gated ? 2 : 1);
  }

  // What the next step needs: memory has until then to answer.
  __device__ void Read() {
    const int at = At();
#pragma unroll
    for (int i = 0; i < 4; ++i) gates_[i] = ups_[i] = 0;
    weight_ = 1.0f;
    if (at < 0) return;
    const uint16_t* const from = static_cast<const uint16_t*>(epilogue_.pre_activation);
    ReadChunk(from + FirstRow() + at, gates_);
    if (epilogue_.activation.is_gated) ReadChunk(from + FirstRow() + at + out_.num_n, ups_);
    if (epilogue_.row_weights != nullptr) weight_ = epilogue_.row_weights[place_.m + Row()];
  }

  // Eight elements, in the place of those that they are made of.
  template <bool kIsSmooth>
  __device__ void Make() {
    const ActivationFunction& f = epilogue_.activation;
    const uint32_t staged = stage_.Chunk(Row(), Chunk());
    const uint4 chunk = LoadChunk(staged);
    uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
    float dot = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float d[2], gate[2], up[2] = {1, 1};
      T::Unpack(words[i], d);
      T::Unpack(gates_[i], gate);
      if (f.is_gated) T::Unpack(ups_[i], up);
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
      ups_[i] = T::Pack(up);
    }
    StoreChunk(staged, make_uint4(words[0], words[1], words[2], words[3]));
    const int at = At();
    if (at >= 0) {
      uint16_t* const to = static_cast<uint16_t*>(epilogue_.gradient) + FirstRow() + at;
      WriteChunk(to, gates_);
      if (f.is_gated) WriteChunk(to + out_.num_n, ups_);
    }
    AddDot(dot);
  }

  // By 8 lanes, of both boxes.
  __device__ void AddDot(float dot) {
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2) {
      dot += __shfl_xor_sync(0xffffffffu, dot, lanes);
    }
    dot_ = step_ % kStagedBoxes == 0 ? dot : dot_ + dot;
    if (step_ % kStagedBoxes != kStagedBoxes - 1 || threadIdx.x % kLanes != 0) return;
    const int row = Row();
    const int num_blocks = (out_.num_n + kColumnsPerDot - 1) / kColumnsPerDot;
    const int block = place_.n / kColumnsPerDot + step_ / kSteps;
    if (row < place_.num_m && block < num_blocks) {
      epilogue_.row_dots[int64_t{place_.m + row} * num_blocks + block] = dot_;
    }
  }

  // Where it stands, not where it is used.
  __device__ static void ReadChunk(const uint16_t* from, uint32_t (&words)[4]) {
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(from)
                 : "memory");
  }

  __device__ static void WriteChunk(uint16_t* to, const uint32_t (&words)[4]) {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  }

  const Epilogue& epilogue_;
  const ResultMatrix out_;
  const StagedRows stage_;
  ResultPlace place_ = {};
  int step_ = 2 * kSteps;  // the next; the stage has the first half of the columns, then the second
  uint32_t gates_[4] = {};
  uint32_t ups_[4] = {};
  float weight_ = 1.0f;
  float dot_ = 0;
  uint32_t kept_[kStagedWords] = {};
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_GRADIENT_ROWS_CUH_
