// Loops over elements on the current device.
#ifndef JAX_EP_TESTS_CPP_GPU_FOR_EACH_H_
#define JAX_EP_TESTS_CPP_GPU_FOR_EACH_H_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "tests/cpp/gpu/require.h"

namespace harness {

template <typename Function>
__global__ void ForEachKernel(int64_t count, Function function) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    function(i);
  }
}

template <typename Function>
void ForEach(int64_t count, const Function& function) {
  if (count == 0) return;
  const int64_t blocks = std::min<int64_t>((count + 127) / 128, 4096);
  ForEachKernel<<<static_cast<unsigned>(blocks), 128>>>(count, function);
  Require(cudaGetLastError(), "a kernel of the test");
}

__device__ inline void MaxInto(unsigned long long* to, unsigned long long value) {
  if (value > *static_cast<volatile unsigned long long*>(to)) atomicMax(to, value);
}

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_FOR_EACH_H_
