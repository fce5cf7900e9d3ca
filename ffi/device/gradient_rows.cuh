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
    Finish();
    place_ = place;
    weights_.Read(epilogue_.row_weights, place);
    uint32_t words[kStagedWords];
#pragma unroll
    for (int i = 0; i < kStagedWords; ++i) words[i] = T::Pack(sums + 2 * i);
    WriteStage(words);
#pragma unroll
    for (int i = 0; i < kStagedWords; ++i) kept_[i] = T::Pack(sums + 2 * kStagedWords + 2 * i);
    half_ = 0;
    word_ = 0;
    dots_[0] = dots_[1] = 0;
  }

  __device__ void Continue() {
    if (half_ == 2) return;
    if (word_ == 0 && half_ == 1) WriteStage(kept_);
    Make(word_);
    word_ += 4;
    if (word_ < kStagedWords) return;
    stage_.Send<2>(out_, place_);
    StoreDots();
    place_.n += kResultN / 2;
    word_ = 0;
    ++half_;
  }

  __device__ void Close() {
    Finish();
    if (threadIdx.x % 32 == 0) WaitStores<0>();
  }

 private:
  __device__ void Finish() {
#pragma unroll 1
    while (half_ < 2) Continue();
  }

  __device__ void WriteStage(const uint32_t (&words)[kStagedWords]) {
    stage_.Wait();
    stage_.Write(words);
    __syncwarp();
  }

  // Four words. What belongs to them is read and written where it is: four lanes have 16 bytes of a
  // row, two such steps a sector, which meets in the L2 cache.
  __device__ void Make(int first) {
    const ActivationFunction& f = epilogue_.activation;
    const int lane = threadIdx.x % 32;
    const int columns = out_.num_n;
    const int pitch = f.is_gated ? 2 * columns : columns;
    int64_t at[4];
    uint32_t gates[4] = {}, ups[4] = {}, words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int m = lane / 4 + i % 2 * 8;
      const int n = place_.n + (first + i) / 2 * 8 + lane % 4 * 2;
      at[i] = m < place_.num_m && n < columns ? int64_t{place_.m + m} * pitch + n : -1;
      if (at[i] < 0) continue;
      gates[i] = ReadPair(at[i]);
      if (f.is_gated) ups[i] = ReadPair(at[i] + columns);
    }
    stage_.ReadWords(first, words);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float weight = weights_.of[i % 2];
      float d[2], gate[2], up[2] = {1, 1};
      T::Unpack(words[i], d);
      T::Unpack(gates[i], gate);
      if (f.is_gated) T::Unpack(ups[i], up);
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const Activated a = Activate<false>(f, gate[x]);
        const float hidden = a.value * up[x];
        const float weighted = weight * d[x];
        dots_[i % 2] += hidden * d[x];
        d[x] = weight * hidden;
        gate[x] = weighted * up[x] * a.slope;
        up[x] = weighted * a.value;
      }
      words[i] = T::Pack(d);
      if (at[i] < 0) continue;
      WritePair(at[i], T::Pack(gate));
      if (f.is_gated) WritePair(at[i] + columns, T::Pack(up));
    }
    __syncwarp();
    stage_.WriteWords(first, words);
  }

  // The steps that follow read the rest of the 128 bytes.
  __device__ uint32_t ReadPair(int64_t at) const {
    uint32_t pair;
    asm volatile("ld.global.L2::128B.u32 %0, [%1];"
                 : "=r"(pair)
                 : "l"(static_cast<const uint16_t*>(epilogue_.pre_activation) + at)
                 : "memory");
    return pair;
  }

  __device__ void WritePair(int64_t at, uint32_t pair) const {
    *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(epilogue_.gradient) + at) = pair;
  }

  // Four lanes have a row.
  __device__ void StoreDots() {
    const int lane = threadIdx.x % 32;
    const int num_blocks = (out_.num_n + kColumnsPerDot - 1) / kColumnsPerDot;
    const int block = place_.n / kColumnsPerDot;
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
  int half_ = 2;  // that the stage has; 2: all is done
  int word_ = 0;  // the next to be made
  uint32_t kept_[kStagedWords] = {};
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_GRADIENT_ROWS_CUH_
