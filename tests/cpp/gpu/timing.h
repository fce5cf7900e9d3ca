// Times of launches by events.
#ifndef JAX_EP_TESTS_CPP_GPU_TIMING_H_
#define JAX_EP_TESTS_CPP_GPU_TIMING_H_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

#include "tests/cpp/gpu/require.h"

namespace harness {

// Returns the median in microseconds of 50 launches, after 10 that do not count.
template <typename Launch>
double MedianTime(const Launch& launch) {
  constexpr int kWarmUps = 10, kLaunches = 60;
  std::vector<cudaEvent_t> events(2 * kLaunches);
  for (cudaEvent_t& event : events) Require(cudaEventCreate(&event), "an event");
  for (int i = 0; i < kLaunches; ++i) {
    Require(cudaEventRecord(events[2 * i]), "an event");
    launch(i);
    Require(cudaEventRecord(events[2 * i + 1]), "an event");
  }
  Require(cudaDeviceSynchronize(), "the kernels");
  std::vector<float> times;
  for (int i = kWarmUps; i < kLaunches; ++i) {
    float time;
    Require(cudaEventElapsedTime(&time, events[2 * i], events[2 * i + 1]), "an event");
    times.push_back(time * 1e3f);
  }
  for (cudaEvent_t event : events) Require(cudaEventDestroy(event), "an event");
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_TIMING_H_
