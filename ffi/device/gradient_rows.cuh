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
  __device__ GradientRows(const MatmulProblem& problem, const ResultMatrix& out, uint32_t staging)
      : epilogue_(problem.epilogue), out_(out), stage_(staging) {}

  __device__ void Store(const ResultPlace& place, int /*group*/,
                        const float (&sums)[kResultN / 2]) {
    place_ = place;
    weights_.Read(epilogue_.row_weights, place);
    uint32_t words[kStagedWords];
#pragma unroll
    for (int i = 0; i < kStagedWords; ++i) words[i] = T::Pack(sums + 2 * i);
    WriteStage(words);
#pragma unroll
    for (int i = 0; i < kStagedWords; ++i) kept_[i] = T::Pack(sums + 2 * kStagedWords + 2 * i);
    word_ = 0;
    dots_[0] = dots_[1] = 0;
    Read();
  }

  __device__ void Continue() {
    if (word_ == kDone) return;
    if (word_ == kStagedWords) WriteStage(kept_);
    if (epilogue_.activation.is_smooth) {
      Make<true>();
    } else {
      Make<false>();
    }
    word_ += 4;
    if (word_ % kStagedWords == 0) {
      ResultPlace place = place_;
      place.n += (word_ / kStagedWords - 1) * (kResultN / 2);
      stage_.Send<2>(out_, place);
      StoreDots(place.n / kColumnsPerDot);
    }
    if (word_ < kDone) Read();
  }

  // To be called before the next Store.
  __device__ void Finish() {
#pragma unroll 1
    while (word_ < kDone) Continue();
  }

  // Shared memory must outlive what was stored.
  __device__ void Close() {
    Finish();
    if (threadIdx.x % 32 == 0) WaitStores<0>();
  }

 private:
  static constexpr int kDone = 2 * kStagedWords;

  __device__ void WriteStage(const uint32_t (&words)[kStagedWords]) {
    stage_.Wait();
    stage_.Write(words);
    __syncwarp();
  }

  __device__ int Pitch() const {
    return epilogue_.activation.is_gated ? 2 * out_.num_n : out_.num_n;
  }

  // Where the pre-activations of a word are, from the first row on; negative: nowhere.
  __device__ int At(int word) const {
    const int lane = threadIdx.x % 32;
    const int m = lane / 4 + word % 2 * 8;
    const int n = place_.n + word / 2 * 8 + lane % 4 * 2;
    return m < place_.num_m && n < out_.num_n ? m * Pitch() + n : -1;
  }

  // What the next step needs: memory has until then to answer. Four lanes have 16 bytes of a row,
  // two such steps a sector, which meets in the caches.
  __device__ void Read() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = At(word_ + i);
      gates_[i] = ups_[i] = 0;
      if (at < 0) continue;
      gates_[i] = ReadPair(at);
      if (epilogue_.activation.is_gated) ups_[i] = ReadPair(at + out_.num_n);
    }
  }

  // Four words, in the place of those that they are made of.
  template <bool kIsSmooth>
  __device__ void Make() {
    const ActivationFunction& f = epilogue_.activation;
    uint32_t words[4];
    stage_.ReadWords(word_ % kStagedWords, words);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float weight = weights_.of[i % 2];
      float d[2], gate[2], up[2] = {1, 1};
      T::Unpack(words[i], d);
      T::Unpack(gates_[i], gate);
      if (f.is_gated) T::Unpack(ups_[i], up);
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const Activated a = ActivateFast<kIsSmooth>(f, gate[x]);
        const float hidden = a.value * up[x];
        const float weighted = weight * d[x];
        dots_[i % 2] += hidden * d[x];
        d[x] = weight * hidden;
        gate[x] = weighted * up[x] * a.slope;
        up[x] = weighted * a.value;
      }
      words[i] = T::Pack(d);
      const int at = At(word_ + i);
      if (at < 0) continue;
      WritePair(at, T::Pack(gate));
      if (f.is_gated) WritePair(at + out_.num_n, T::Pack(up));
    }
    __syncwarp();
    stage_.WriteWords(word_ % kStagedWords, words);
  }

  // The steps that follow read the rest of the 128 bytes.
  __device__ uint32_t ReadPair(int at) const {
    uint32_t pair;
    asm volatile("ld.global.L2::128B.u32 %0, [%1];"
                 : "=r"(pair)
                 : "l"(static_cast<const uint16_t*>(epilogue_.pre_activation) +
                       int64_t{place_.m} * Pitch() + at)
                 : "memory");
    return pair;
  }

  __device__ void WritePair(int at, uint32_t pair) const {
    uint16_t* const first =
        static_cast<uint16_t*>(epilogue_.gradient) + int64_t{place_.m} * Pitch();
    *reinterpret_cast<uint32_t*>(first + at) = pair;
  }

  // Four lanes have a row.
  __device__ void StoreDots(int block) {
    const int lane = threadIdx.x % 32;
    const int num_blocks = (out_.num_n + kColumnsPerDot - 1) / kColumnsPerDot;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float dot = dots_[i];
      dot += __shfl_xor_sync(0xffffffffu, dot, 1);
      dot += __shfl_xor_sync(0xffffffffu, dot, 2);
      const int m = lane / 4 + 8 * i;
      if (lane % 4 == 0 && m < place_.num_m && block < num_blocks) {
        epilogue_.row_dots[int64_t{place_.m + m} * num_blocks + block] = dot;
      }
      dots_[i] = 0;
    }
  }
  static_assert(kResultN / 2 == kColumnsPerDot);

  const Epilogue& epilogue_;
  const ResultMatrix out_;
  const StagedRows stage_;
  ResultPlace place_ = {};
  RowWeights weights_ = {};
  float dots_[2] = {};
  int word_ = kDone;  // the next to be made; the stage has the first half, then the second
  uint32_t gates_[4] = {};
  uint32_t ups_[4] = {};
  uint32_t kept_[kStagedWords] = {};
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_GRADIENT_ROWS_CUH_
