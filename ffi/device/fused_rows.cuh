// What a warp makes of 16 rows of sums before it stores them: activations and their gradients
// (sm_90). Registers are those of result_rows.cuh.
#ifndef JAX_EP_DEVICE_FUSED_ROWS_CUH_
#define JAX_EP_DEVICE_FUSED_ROWS_CUH_

#include "ffi/device/activation.cuh"
#include "ffi/device/result_rows.cuh"
#include "ffi/device/wgmma.cuh"

namespace jax_ep {

class FusedRows {
 public:
  // `out` and `place` are of the F columns of the result; `group` is that of the rows.
  __device__ FusedRows(const MatmulProblem& problem, const ResultMatrix& out,
                       const ResultPlace& place, int group)
      : epilogue_(problem.epilogue), out_(out), place_(place), group_(group) {
    const int row = threadIdx.x % 32 / 4;
    for (int half = 0; half < 2; ++half) {
      const int m = row + 8 * half;
      weights_[half] = epilogue_.row_weights != nullptr && m < place.num_m
                           ? epilogue_.row_weights[place.m + m]
                           : 1.0f;
    }
  }

  // kActivation. Of gated sums the first half is the gate.
  template <typename T>
  __device__ void Activate(ResultRows& rows, float (&sums)[kResultN / 2]) {
    const ActivationFunction& f = epilogue_.activation;
    rows.Finish(out_);
    for (int half = 0; half < 2; ++half) {
      if (epilogue_.bias != nullptr) AddBias(half, sums);
    }
    if (!f.is_identity || epilogue_.pre_activation != nullptr) {
#pragma unroll
      for (int half = 0; half < 2; ++half) RoundAndKeep<T>(rows, half, sums);
    }
    if (f.is_gated) {
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        const float value = jax_ep::Activate<false>(f, sums[i]).value;
        sums[i] = weights_[i / 2 % 2] * (value * sums[kHalf + i]);
      }
      rows.template StoreHalfRounded<T>(out_, place_, sums);
    } else {
#pragma unroll
      for (int i = 0; i < 2 * kHalf; ++i) {
        const float value = f.is_identity ? sums[i] : jax_ep::Activate<false>(f, sums[i]).value;
        sums[i] = weights_[i / 2 % 2] * value;
      }
      rows.template StoreRounded<T>(out_, place_, sums);
    }
  }

  // kActivationGradient: sums are gradients of the hidden rows, without their weight.
  template <typename T>
  __device__ void Gradient(ResultRows& rows, float (&sums)[kResultN / 2]) {
    const ActivationFunction& f = epilogue_.activation;
    rows.Finish(out_);
    float dots[2] = {0, 0};
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      ResultPlace place = place_;
      place.n += quarter * (kResultN / 4);
      uint32_t words[kResultN / 8];
      rows.LoadQuarters(PreActivation(epilogue_.pre_activation, 0),
                        PreActivation(epilogue_.pre_activation, 1), f.is_gated, place, words);
#pragma unroll
      for (int i = 0; i < kResultN / 16; ++i) {
        float* const d = &sums[quarter * (kHalf / 2) + 2 * i];
        float gate[2], up[2] = {1, 1};
        T::Unpack(words[i], gate);
        if (f.is_gated) T::Unpack(words[kResultN / 16 + i], up);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const Activated a = jax_ep::Activate<false>(f, gate[j]);
          const float weighted = weights_[i % 2] * d[j];
          const float hidden = a.value * up[j];
          dots[i % 2] += hidden * d[j];
          d[j] = weights_[i % 2] * hidden;
          gate[j] = weighted * up[j] * a.slope;
          up[j] = weighted * a.value;
        }
        words[i] = T::Pack(gate);
        words[kResultN / 16 + i] = T::Pack(up);
      }
      FenceSums(sums);  // the stores take registers: first all that is computed, then they
      rows.StoreQuarters(PreActivation(epilogue_.gradient, 0), PreActivation(epilogue_.gradient, 1),
                         f.is_gated, place, words);
      if (quarter % 2 == 1) StoreDots(quarter / 2, dots);
    }
    rows.template StoreRounded<T>(out_, place_, sums);
  }

 private:
  static constexpr int kHalf = kResultN / 4;  // a lane's sums in half of the columns

  // Half 1 of the pre-activations: up, or without gates what follows half 0 in the tile.
  __device__ ResultMatrix PreActivation(void* data, int half) const {
    const int columns = out_.num_n;
    if (!epilogue_.activation.is_gated) return {nullptr, data, 0, columns, columns};
    return {nullptr, static_cast<uint16_t*>(data) + half * columns, 0, columns, 2 * columns};
  }

  __device__ int ColumnOfHalf(int half) const {
    return place_.n + (epilogue_.activation.is_gated ? 0 : half * (kResultN / 2));
  }

  __device__ void AddBias(int half, float (&sums)[kResultN / 2]) const {
    const bool is_gated = epilogue_.activation.is_gated;
    const int columns = out_.num_n;
    const int first = ColumnOfHalf(half) + threadIdx.x % 4 * 2;
    const float* const bias = epilogue_.bias + int64_t{group_} * columns * (is_gated ? 2 : 1) +
                              (is_gated ? half * columns : 0);
#pragma unroll
    for (int i = 0; i < kHalf; i += 4) {
      const int column = first + 2 * i;
      if (column >= columns) break;
      const float2 pair = *reinterpret_cast<const float2*>(bias + column);
      float* const to = &sums[i];
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        if (half == 0) {
          to[2 * row] += pair.x;
          to[2 * row + 1] += pair.y;
        } else {
          to[kHalf + 2 * row] += pair.x;
          to[kHalf + 2 * row + 1] += pair.y;
        }
      }
    }
  }

  // The activation reads what a backward pass will read.
  template <typename T>
  __device__ void RoundAndKeep(ResultRows& rows, int half, float (&sums)[kResultN / 2]) const {
    uint32_t words[kResultN / 8];
#pragma unroll
    for (int i = 0; i < kResultN / 8; ++i) {
      float* const pair = &sums[half * kHalf + 2 * i];
      words[i] = T::Pack(pair);
      if (!epilogue_.activation.is_identity) T::Unpack(words[i], pair);
    }
    if (epilogue_.pre_activation == nullptr) return;
    ResultPlace place = place_;
    place.n = ColumnOfHalf(half);
    rows.StoreWords(PreActivation(epilogue_.pre_activation, half), place, words);
  }

  // Four lanes have a row.
  __device__ void StoreDots(int half, float (&dots)[2]) const {
    const int lane = threadIdx.x % 32;
    const int num_blocks = (out_.num_n + kColumnsPerDot - 1) / kColumnsPerDot;
    const int block = place_.n / kColumnsPerDot + half;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float dot = dots[i];
      dot += __shfl_xor_sync(0xffffffffu, dot, 1);
      dot += __shfl_xor_sync(0xffffffffu, dot, 2);
      const int m = lane / 4 + 8 * i;
      if (lane % 4 == 0 && m < place_.num_m && block < num_blocks) {
        epilogue_.row_dots[int64_t{place_.m + m} * num_blocks + block] = dot;
      }
      dots[i] = 0;
    }
  }

  const Epilogue& epilogue_;
  const ResultMatrix& out_;
  const ResultPlace& place_;
  const int group_;
  float weights_[2];
};
static_assert(kResultN / 2 == kColumnsPerDot);

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_FUSED_ROWS_CUH_
