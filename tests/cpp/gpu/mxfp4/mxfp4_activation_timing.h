// Times the matmuls of gpt-oss's experts with their epilogues: beside the plain matmul and a loop
// over its results, the bfloat16 kernel with an epilogue, and a copy.
#ifndef JAX_EP_TESTS_CPP_GPU_MXFP4_MXFP4_ACTIVATION_TIMING_H_
#define JAX_EP_TESTS_CPP_GPU_MXFP4_MXFP4_ACTIVATION_TIMING_H_

#include <algorithm>
#include <cstdio>
#include <vector>

#include "ffi/kernels/matmul/grouped_matmul_activation.h"
#include "tests/cpp/gpu/mxfp4/mxfp4_activation_runner.h"
#include "tests/cpp/gpu/mxfp4/mxfp4_timing.h"

namespace harness {

// Does what follows a plain matmul with float32 results, as XLA's loop would: a thread per result.
struct MxFp4EpilogueFunction {
  bool is_gated;
  int64_t f;
  const float* accumulators;
  const float* bias;
  const float* row_weights;
  const int32_t* sizes;
  int num_groups;
  uint16_t* out;

  __device__ void operator()(int64_t i) const {
    const int64_t row = i / f;
    const int64_t column = i % f;
    int group = 0;
    for (int64_t end = sizes[0]; group + 1 < num_groups && row >= end; end += sizes[group]) ++group;
    const int64_t columns = is_gated ? 2 * f : f;
    const auto pre = [&](int64_t at) {
      return accumulators[row * columns + at] + bias[group * columns + at];
    };
    if (!is_gated) {
      out[i] = ToBFloat16(pre(column) * row_weights[row]);
      return;
    }
    const float gate = fminf(FromBFloat16(ToBFloat16(pre(column))), 7.0f);
    const float up = fminf(fmaxf(FromBFloat16(ToBFloat16(pre(f + column))), -7.0f), 7.0f);
    out[i] = ToBFloat16(gate / (1.0f + __expf(-1.702f * gate)) * (up + 1.0f));
  }
};

inline void TimeMxFp4Activation(int64_t rows, bool is_gated, double copy_rate) {
  constexpr int kGroups = 32;
  constexpr int64_t kSize = 2880;  // H and F
  const int64_t columns = is_gated ? 2 * kSize : kSize;
  const std::vector<int32_t> sizes = Draw(rows, kGroups, 0);
  // All weights are filled: rotations give rows to every group.
  const std::vector<int32_t> filled(kGroups, static_cast<int32_t>((rows + kGroups) / kGroups));
  const int64_t m = std::max<int64_t>(rows, 32) + kGroups;
  const MxFp4ActivationRunner fused({.kind = is_gated ? kMxFp4Kinds[3] : kMxFp4Kinds[0],
                                     .m = m,
                                     .k = kSize,
                                     .f = kSize,
                                     .sizes = filled,
                                     .has_bias = true,
                                     .has_weights = !is_gated});
  const MxFp4Runner plain(
      {.m = m, .k = kSize, .n = columns, .sizes = filled, .zero_tail = false, .out = kF32});
  GuardedBuffer lhs, rhs, bias, weights, out;  // read or written by the bfloat16 kernel
  lhs.Reset(m * kSize * 2);
  rhs.Reset(kGroups * kSize * columns * 2);
  ForEach(m * kSize, FillFunction{kBF16, 3, lhs.data(), m * kSize});
  ForEach(kGroups * kSize * columns, FillFunction{kBF16, 4, rhs.data(), kGroups * kSize * columns});
  bias.Reset(kGroups * columns * sizeof(float));
  weights.Reset(m * sizeof(float));
  out.Reset(m * kSize * 2);
  ForEach(kGroups * columns, FillFunction{kF32, 1, bias.data(), kGroups * columns});
  ForEach(m, FillFunction{kF32, 2, weights.data(), m});
  const auto check = [](const jax_ep::Status& status) {
    if (status.ok()) return;
    std::printf("FAIL timing: %s\n", status.message.c_str());
    std::_Exit(1);
  };
  const auto launch_fused = [&](cudaStream_t stream, const int32_t* group_sizes) {
    check(fused.Launch(stream, group_sizes));
  };
  const auto launch_plain = [&](cudaStream_t stream, const int32_t* group_sizes) {
    check(plain.Launch(stream, group_sizes));
  };
  const auto launch_apart = [&](cudaStream_t stream, const int32_t* group_sizes) {
    launch_plain(stream, group_sizes);
    const MxFp4EpilogueFunction epilogue = {.is_gated = is_gated,
                                            .f = kSize,
                                            .accumulators = plain.ResultAs<float>(),
                                            .bias = bias.As<float>(),
                                            .row_weights = weights.As<float>(),
                                            .sizes = group_sizes,
                                            .num_groups = kGroups,
                                            .out = out.As<uint16_t>()};
    const auto blocks = static_cast<unsigned>((m * kSize + 255) / 256);
    ForEachKernel<<<blocks, 256, 0, stream>>>(m * kSize, epilogue);
  };
  const auto launch_sixteen = [&](cudaStream_t stream, const int32_t* group_sizes) {
    const jax_ep::GroupedMatmulActivationConfig config = {
        .activation = is_gated ? Activation::kSwiglu : Activation::kNone,
        .has_bias = true,
        .has_row_weights = !is_gated};
    check(jax_ep::LaunchGroupedMatmulActivation(
        config, {kGroups, m, kSize, kSize, kBF16, kBF16, kBF16},
        {.lhs = lhs.data(),
         .rhs = rhs.data(),
         .group_sizes = group_sizes,
         .bias = bias.As<float>(),
         .row_weights = is_gated ? nullptr : weights.As<float>(),
         .out = out.data(),
         .pre_activation = nullptr},
        0, stream));
  };
  const auto rotations = Rotations(sizes);
  const TimedGraph fused_graph(launch_fused, rotations);
  const TimedGraph plain_graph(launch_plain, rotations);
  const TimedGraph apart_graph(launch_apart, rotations);
  const TimedGraph sixteen_graph(launch_sixteen, rotations);
  const std::vector<float> times =
      TimeInterleaved({&fused_graph, &plain_graph, &apart_graph, &sixteen_graph}, 100);
  const double active = static_cast<double>(
      std::count_if(sizes.begin(), sizes.end(), [](int32_t size) { return size > 0; }));
  const double bytes = active * static_cast<double>(kSize * columns) * (0.5 + 1.0 / 32);
  std::printf(
      "rows %-5d %-4s %2d active  epilogue %8.2f us (%.2f of a copy)  plain float32 %8.2f us  and "
      "a loop %8.2f us  bf16 with swiglu's %8.2f us, %.2f x\n",
      int(rows), is_gated ? "up" : "down", int(active), times[0],
      bytes / times[0] * 1e-6 / copy_rate, times[1], times[2], times[3], times[3] / times[0]);
  std::fflush(stdout);
}

inline void TimeMxFp4Activation() {
  const double copy_rate = CopyRate();
  std::printf("copy %.2f TB/s\n", copy_rate);
  // gpt-oss-120b on one of four ranks: as many rows as tokens on average.
  for (int64_t rows : {1, 4, 16, 64, 256, 1024, 4096, 16384}) {
    for (bool is_gated : {true, false}) TimeMxFp4Activation(rows, is_gated, copy_rate);
  }
}

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_MXFP4_MXFP4_ACTIVATION_TIMING_H_
