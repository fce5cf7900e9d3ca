// Calls in flight: one custom call launches a kernel on the stream of its lane and returns, a later
// one of the same program joins it. What lies between runs at the same time.
#ifndef JAX_EP_RUNTIME_CALLS_IN_FLIGHT_H_
#define JAX_EP_RUNTIME_CALLS_IN_FLIGHT_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "ffi/runtime/status.h"

namespace jax_ep {

// The addresses of a call's results and operands, in this order.
using BufferAddresses = std::vector<const void*>;

// Thread-safe. Devices are CUDA ordinals; each must be the current one. Streams are not captured:
// what joins a capture would have to be part of it.
class InFlightCalls {
 public:
  // Never destroyed: threads of XLA may outlive static destructors.
  static InFlightCalls& OfProcess();

  // Finds the stream of a lane's calls. It has the highest priority, so that blocks of its kernels
  // are placed before those that other streams have waiting.
  Status FindStream(int device, int64_t lane, cudaStream_t* stream);

  // Finds it, and makes what follows there wait for all that is in `from`.
  Status Fork(int device, int64_t lane, cudaStream_t from, cudaStream_t* stream);

  // Remembers the call that was launched last in a lane's stream.
  Status Add(int device, cudaStream_t stream, const BufferAddresses& buffers);

  // Makes what follows in `stream` wait for the call that has these buffers. An error if there is
  // none, as XLA has then copied one: the call still uses the original.
  Status Join(int device, cudaStream_t stream, const BufferAddresses& buffers);

 private:
  struct Call {
    BufferAddresses buffers;
    cudaEvent_t ended;
  };
  using Key = std::pair<int, const void*>;  // the device, and the address of the first result

  Status TakeEvent(int device, cudaEvent_t* event);

  std::mutex mutex_;
  std::map<std::pair<int, int64_t>, cudaStream_t> streams_;  // indexed by device and lane
  std::map<int, std::vector<cudaEvent_t>> idle_events_;      // indexed by device
  std::map<Key, Call> calls_;
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_CALLS_IN_FLIGHT_H_
