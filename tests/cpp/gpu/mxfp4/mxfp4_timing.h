// Times the matmul with MXFP4 weights beside the bfloat16 kernel at the same shapes, and a copy.
#ifndef JAX_EP_TESTS_CPP_GPU_MXFP4_MXFP4_TIMING_H_
#define JAX_EP_TESTS_CPP_GPU_MXFP4_MXFP4_TIMING_H_

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <vector>

#include "tests/cpp/gpu/matmul/matmul_timing.h"
#include "tests/cpp/gpu/mxfp4/mxfp4_runner.h"

namespace harness {

// A launch with the given group sizes.
using SizedLaunch = std::function<void(cudaStream_t, const int32_t*)>;

// Launches in a CUDA graph, each with other group sizes, so that none finds its weights in the L2
// cache.
class TimedGraph {
 public:
  TimedGraph(const SizedLaunch& launch, const std::vector<std::vector<int32_t>>& rotations) {
    const size_t groups = rotations[0].size();
    std::vector<int32_t> all;
    for (const auto& sizes : rotations) all.insert(all.end(), sizes.begin(), sizes.end());
    sizes_.Set(all);
    launches_ = static_cast<int>(rotations.size());
    cudaStream_t stream;
    cudaGraph_t graph;
    Require(cudaStreamCreate(&stream), "a stream");
    Require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "a capture");
    for (int i = 0; i < launches_; ++i) launch(stream, sizes_.As<int32_t>() + i * groups);
    Require(cudaStreamEndCapture(stream, &graph), "a capture");
    Require(cudaGraphInstantiate(&graph_, graph, 0), "a graph");
    Require(cudaGraphDestroy(graph), "a graph");
    Require(cudaStreamDestroy(stream), "a stream");
  }
  TimedGraph(const TimedGraph&) = delete;
  ~TimedGraph() { static_cast<void>(cudaGraphExecDestroy(graph_)); }

  // Returns how often to run the graph in so many milliseconds.
  int CountWithin(float milliseconds) const {
    return std::max(1, static_cast<int>(milliseconds * 1e3f / (Time(1) * launches_)));
  }

  // Returns microseconds per launch.
  float Time(int count) const {
    cudaEvent_t begin, end;
    Require(cudaEventCreate(&begin), "an event");
    Require(cudaEventCreate(&end), "an event");
    Require(cudaEventRecord(begin), "an event");
    for (int i = 0; i < count; ++i) Require(cudaGraphLaunch(graph_, nullptr), "a graph");
    Require(cudaEventRecord(end), "an event");
    Require(cudaEventSynchronize(end), "the kernels");
    float milliseconds = 0;
    Require(cudaEventElapsedTime(&milliseconds, begin, end), "an event");
    Require(cudaEventDestroy(begin), "an event");
    Require(cudaEventDestroy(end), "an event");
    return 1e3f * milliseconds / static_cast<float>(count * launches_);
  }

 private:
  GuardedBuffer sizes_;
  cudaGraphExec_t graph_ = nullptr;
  int launches_ = 0;
};

// Returns the medians of interleaved rounds, in microseconds per launch.
inline std::vector<float> TimeInterleaved(const std::vector<const TimedGraph*>& graphs,
                                          float milliseconds) {
  constexpr int kRounds = 7;
  std::vector<std::vector<float>> times(graphs.size());
  std::vector<int> counts;
  for (const TimedGraph* graph : graphs) {
    static_cast<void>(graph->Time(1));
    counts.push_back(graph->CountWithin(milliseconds));
  }
  for (int round = 0; round < kRounds; ++round) {
    for (size_t i = 0; i < graphs.size(); ++i) times[i].push_back(graphs[i]->Time(counts[i]));
  }
  std::vector<float> medians;
  for (auto& list : times) {
    std::sort(list.begin(), list.end());
    medians.push_back(list[list.size() / 2]);
  }
  return medians;
}

// Returns the terabytes per second that a copy of 512 MiB reads and writes.
inline double CopyRate() {
  constexpr size_t kBytes = size_t{1} << 29;
  GuardedBuffer from, to;
  from.Reset(kBytes);
  to.Reset(kBytes);
  std::vector<double> rates;
  cudaEvent_t begin, end;
  Require(cudaEventCreate(&begin), "an event");
  Require(cudaEventCreate(&end), "an event");
  for (int i = 0; i < 20; ++i) {
    Require(cudaEventRecord(begin), "an event");
    Require(cudaMemcpyAsync(to.data(), from.data(), kBytes, cudaMemcpyDeviceToDevice), "a copy");
    Require(cudaEventRecord(end), "an event");
    Require(cudaEventSynchronize(end), "the copy");
    float milliseconds = 0;
    Require(cudaEventElapsedTime(&milliseconds, begin, end), "an event");
    rates.push_back(2.0 * kBytes / milliseconds * 1e-9);
  }
  Require(cudaEventDestroy(begin), "an event");
  Require(cudaEventDestroy(end), "an event");
  std::sort(rates.begin(), rates.end());
  return rates[rates.size() / 2];
}

// Sizes of 32 groups in 32 orders, so that few groups with rows are others each time.
inline std::vector<std::vector<int32_t>> Rotations(const std::vector<int32_t>& sizes) {
  std::vector<std::vector<int32_t>> rotations;
  for (size_t i = 0; i < 32; ++i) {
    std::vector<int32_t> rotated = sizes;
    std::rotate(rotated.begin(), rotated.begin() + i * 5 % rotated.size(), rotated.end());
    rotations.push_back(rotated);
  }
  return rotations;
}

// `rows` rows of 32 groups, drawn at random or equal.
inline void TimeMxFp4(int64_t rows, int64_t k, int64_t n, bool is_even, double copy_rate) {
  constexpr int kGroups = 32;
  const std::vector<int32_t> sizes =
      is_even ? std::vector<int32_t>(kGroups, static_cast<int32_t>(rows / kGroups))
              : Draw(rows, kGroups, 0);
  // All weights are filled: rotations give rows to every group.
  const std::vector<int32_t> filled(kGroups, static_cast<int32_t>((rows + kGroups) / kGroups));
  const int64_t m = std::max<int64_t>(rows, 32) + kGroups;
  MxFp4Runner four({.m = m, .k = k, .n = n, .sizes = filled, .zero_tail = false});
  four.SetNumRows(rows);
  const Runner sixteen(
      {.kind = kForward, .m = m, .k = k, .n = n, .sizes = filled, .zero_tail = false});
  const auto rotations = Rotations(sizes);
  const auto check = [](const jax_ep::Status& status) {
    if (status.ok()) return;
    std::printf("FAIL timing: %s\n", status.message.c_str());
    std::_Exit(1);
  };
  const TimedGraph four_graph(
      [&](cudaStream_t stream, const int32_t* sizes) { check(four.Launch(stream, sizes)); },
      rotations);
  const TimedGraph sixteen_graph(
      [&](cudaStream_t stream, const int32_t* sizes) { check(sixteen.Launch(stream, sizes)); },
      rotations);
  const std::vector<float> times = TimeInterleaved({&four_graph, &sixteen_graph}, 100);
  const double active = static_cast<double>(
      std::count_if(sizes.begin(), sizes.end(), [](int32_t size) { return size > 0; }));
  const double weights = active * static_cast<double>(k * n);
  const double flops = 2.0 * static_cast<double>(Sum(sizes)) * k * n;
  const double rate = weights * (0.5 + 1.0 / 32) / times[0] * 1e-6;
  std::printf(
      "rows %-5d K=%d N=%-5d %2d active %-11s mxfp4 %8.2f us %5.2f TB/s (%.2f of a copy) "
      "%4.0f TFLOP/s  bf16 %8.2f us %5.2f TB/s %4.0f TFLOP/s  %.2f x\n",
      int(rows), int(k), int(n), int(active), is_even ? "even" : "multinomial", times[0], rate,
      rate / copy_rate, flops / times[0] * 1e-6, times[1], weights * 2 / times[1] * 1e-6,
      flops / times[1] * 1e-6, times[1] / times[0]);
  std::fflush(stdout);
}

// `only_decode`: up to 256 rows.
inline void TimeMxFp4(bool only_decode) {
  const double copy_rate = CopyRate();
  std::printf("copy %.2f TB/s\n", copy_rate);
  // gpt-oss-120b on one of four ranks: as many rows as tokens on average.
  for (int64_t rows : {1, 4, 8, 16, 32, 64, 256}) {
    for (int64_t n : {5760, 2880}) TimeMxFp4(rows, 2880, n, false, copy_rate);
  }
  if (only_decode) return;
  for (int64_t rows : {1024, 4096, 16384}) {
    for (int64_t n : {5760, 2880}) TimeMxFp4(rows, 2880, n, false, copy_rate);
  }
  TimeMxFp4(4096, 2880, 5760, true, copy_rate);
  TimeMxFp4(16384, 2880, 5760, true, copy_rate);
}

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_MXFP4_MXFP4_TIMING_H_
