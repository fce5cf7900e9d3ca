// XLA's streams and runs, and the devices of a process.
#ifndef JAX_EP_TESTS_CPP_EMULATION_STREAMS_H_
#define JAX_EP_TESTS_CPP_EMULATION_STREAMS_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "cuda_runtime_api.h"
#include "ffi/runtime/transport/transport.h"

namespace jax_ep::testing {

// Each device has a stream for each lane, which lives until the process ends.
inline cudaStream_t StreamOf(int device, int64_t lane = 0) {
  static std::mutex mutex;
  static std::map<std::pair<int, int64_t>, cudaStream_t> streams;
  const std::lock_guard lock(mutex);
  cudaStream_t& stream = streams[{device, lane}];
  if (stream == nullptr) {
    int before = 0;
    cudaGetDevice(&before);
    cudaSetDevice(device);
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    cudaSetDevice(before);
  }
  return stream;
}

// The ranks that this process drives, of a mesh that spans several. Rank first + i is on device i.
struct LocalRanks {
  int first = 0;
  int count = -1;  // all
  const Transport* transport = nullptr;
  void* communicator = nullptr;
};

inline int64_t NextRun() {
  static std::atomic<int64_t> run = 0;
  return ++run;
}

}  // namespace jax_ep::testing

#endif  // JAX_EP_TESTS_CPP_EMULATION_STREAMS_H_
