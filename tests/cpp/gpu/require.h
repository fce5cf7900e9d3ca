// Ends the program at the first error of the CUDA runtime.
#ifndef JAX_EP_TESTS_CPP_GPU_REQUIRE_H_
#define JAX_EP_TESTS_CPP_GPU_REQUIRE_H_

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

namespace harness {

inline void Require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("FAIL %s: %s (%s)\n", what, cudaGetErrorName(error), cudaGetErrorString(error));
  std::fflush(stdout);
  std::_Exit(1);
}

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_REQUIRE_H_
