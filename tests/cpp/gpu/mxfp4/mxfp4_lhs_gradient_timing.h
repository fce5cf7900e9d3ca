// Times the row gradient of matmuls with MXFP4 weights beside that of bfloat16 weights, and beside
// a pass that dequantizes all weights for it.
#ifndef JAX_EP_TESTS_CPP_GPU_MXFP4_MXFP4_LHS_GRADIENT_TIMING_H_
#define JAX_EP_TESTS_CPP_GPU_MXFP4_MXFP4_LHS_GRADIENT_TIMING_H_

#include <algorithm>
#include <cstdio>
#include <vector>

#include "tests/cpp/gpu/matmul/matmul_timing.h"
#include "tests/cpp/gpu/mxfp4/mxfp4_runner.h"
#include "tests/cpp/gpu/mxfp4/mxfp4_timing.h"

namespace harness {

// Dequantizes eight values per thread, for scales that bfloat16 has.
__global__ void DequantizeMxFp4(const uint32_t* values, const uint8_t* scales, uint4* to,
                                int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const uint32_t word = values[i];
  const float scale = __uint_as_float(uint32_t{scales[i / (kMxFp4Values / 8)]} << 23);
  uint32_t words[4];
  for (int pair = 0; pair < 4; ++pair) {
    uint32_t halves[2];
    for (int j = 0; j < 2; ++j) {
      const uint32_t bits = word >> (8 * pair + 4 * j);
      // The bits of E2M1, shifted, are those of a float32 that is 2^126 times too small.
      const float magnitude = __uint_as_float((bits & 7) << 22) * 0x1p126f;
      const float value = magnitude * scale;
      halves[j] = __float_as_uint(value) >> 16 | (bits & 8) << 12;
    }
    words[pair] = halves[0] | halves[1] << 16;
  }
  to[i] = make_uint4(words[0], words[1], words[2], words[3]);
}

// `rows` rows of 32 groups, drawn at random or equal; k is contracted.
inline void TimeMxFp4LhsGradient(int64_t rows, int64_t k, int64_t n, bool is_even) {
  constexpr int kGroups = 32;
  const std::vector<int32_t> sizes =
      is_even ? std::vector<int32_t>(kGroups, static_cast<int32_t>(rows / kGroups))
              : Draw(rows, kGroups, 0);
  // All weights are filled: rotations give rows to every group.
  const std::vector<int32_t> filled(kGroups, static_cast<int32_t>((rows + kGroups) / kGroups));
  const int64_t m = std::max<int64_t>(rows, 32) + kGroups;
  MxFp4Case c{.m = m, .k = k, .n = n, .sizes = filled, .zero_tail = false};
  c.is_lhs_gradient = true;
  const MxFp4Runner four(c);
  c.out = kF32;
  const MxFp4Runner four_float32(c);
  // The layouts of weights [groups, K, N] in training, and of dequantized ones.
  const Runner sixteen(
      {.kind = kTransposed, .m = m, .k = k, .n = n, .sizes = filled, .zero_tail = false});
  const Runner dequantized(
      {.kind = kForward, .m = m, .k = k, .n = n, .sizes = filled, .zero_tail = false});
  GuardedBuffer weights;
  const int64_t count = kGroups * k * n / 8;
  weights.Reset(count * 16);
  const auto rotations = Rotations(sizes);
  const auto check = [](const jax_ep::Status& status) {
    if (status.ok()) return;
    std::printf("FAIL timing: %s\n", status.message.c_str());
    std::_Exit(1);
  };
  const auto graph = [&](const auto& runner) {
    return SizedLaunch([&check, &runner](cudaStream_t stream, const int32_t* sizes) {
      check(runner.Launch(stream, sizes));
    });
  };
  const TimedGraph four_graph(graph(four), rotations);
  const TimedGraph float32_graph(graph(four_float32), rotations);
  const TimedGraph sixteen_graph(graph(sixteen), rotations);
  const TimedGraph pass_graph(
      [&](cudaStream_t stream, const int32_t*) {
        DequantizeMxFp4<<<static_cast<unsigned>((count + 255) / 256), 256, 0, stream>>>(
            reinterpret_cast<const uint32_t*>(four.values()), four.scales(), weights.As<uint4>(),
            count);
      },
      rotations);
  const TimedGraph dequantized_graph(graph(dequantized), rotations);
  const std::vector<float> times = TimeInterleaved(
      {&four_graph, &float32_graph, &sixteen_graph, &pass_graph, &dequantized_graph}, 60);
  const double active = static_cast<double>(
      std::count_if(sizes.begin(), sizes.end(), [](int32_t size) { return size > 0; }));
  const double flops = 2.0 * static_cast<double>(Sum(sizes)) * k * n;
  const double rate = active * static_cast<double>(k * n) * (0.5 + 1.0 / 32) / times[0] * 1e-6;
  std::printf(
      "rows %-5d N=%-5d -> K=%d %2d active %-11s mxfp4 %8.2f us %5.2f TB/s %4.0f TFLOP/s  to "
      "float32 "
      "%8.2f us  bf16 %8.2f us %4.0f TFLOP/s %.2f x  dequantize %7.2f + %8.2f us %.2f x\n",
      int(rows), int(k), int(n), int(active), is_even ? "even" : "multinomial", times[0], rate,
      flops / times[0] * 1e-6, times[1], times[2], flops / times[2] * 1e-6, times[2] / times[0],
      times[3], times[4], (times[3] + times[4]) / times[0]);
  std::fflush(stdout);
}

inline void TimeMxFp4LhsGradients() {
  // gpt-oss-120b on one of four ranks, the gradients of up's rows and of down's.
  for (int64_t rows : {64, 256, 1024, 4096, 16384}) {
    for (int64_t k : {5760, 2880}) TimeMxFp4LhsGradient(rows, k, 2880, false);
  }
  for (int64_t rows : {2048, 4096, 16384}) TimeMxFp4LhsGradient(rows, 5760, 2880, true);
}

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_MXFP4_MXFP4_LHS_GRADIENT_TIMING_H_
