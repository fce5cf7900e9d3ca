// A rank of a group, and how its calls of the CUDA runtime are checked.
#ifndef JAX_EP_TESTS_CPP_GPU_TRANSFER_RANK_H_
#define JAX_EP_TESTS_CPP_GPU_TRANSFER_RANK_H_

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "ffi/device/protocol/control_block.h"
#include "ffi/runtime/status.h"

namespace harness {

#define CUDA_OK(call)                                                                            \
  do {                                                                                           \
    const cudaError_t error_ = (call);                                                           \
    if (error_ != cudaSuccess) {                                                                 \
      std::printf("FAIL %s:%d %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_)); \
      std::fflush(stdout);                                                                       \
      std::_Exit(1);                                                                             \
    }                                                                                            \
  } while (0)

#define STATUS_OK(call)                                                            \
  do {                                                                             \
    const jax_ep::Status status_ = (call);                                         \
    if (!status_.ok()) {                                                           \
      std::printf("FAIL %s:%d %s\n", __FILE__, __LINE__, status_.message.c_str()); \
      std::fflush(stdout);                                                         \
      std::_Exit(1);                                                               \
    }                                                                              \
  } while (0)

struct Rank {
  int device = 0;
  cudaStream_t stream = nullptr;
  jax_ep::ControlBlock* control = nullptr;
  jax_ep::GenerationState* state = nullptr;  // for the next generation
  jax_ep::Inbox* inbox = nullptr;
  unsigned char* workspace = nullptr;
  jax_ep::AbortRecord* record = nullptr;  // host
  unsigned char* arena = nullptr;
  size_t used = 0;
};

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_TRANSFER_RANK_H_
