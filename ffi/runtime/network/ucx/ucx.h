// The network by UCX: InfiniBand, RoCE, TCP, shared memory, and whatever else UCX knows.
#ifndef JAX_EP_RUNTIME_NETWORK_UCX_UCX_H_
#define JAX_EP_RUNTIME_NETWORK_UCX_UCX_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ffi/runtime/network/network.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

// UCX's settings without the prefix UCX_, such as {"TLS", "tcp,cuda_copy"}.
using UcxSettings = std::vector<std::pair<std::string, std::string>>;

// How bytes and flags go. By default RDMA carries both, cuda_ipc only bytes, and messages the rest.
enum class UcxWay : uint8_t { kDefault, kPuts, kPutsWithFlagsInMessages, kMessages };

struct UcxFlag {
  void* to;
  uint64_t value;
};

// Stores what arrives in messages in memory of a GPU. Called in Progress.
class UcxDeviceMemory {
 public:
  virtual ~UcxDeviceMemory() = default;
  // Returns when the bytes are there.
  virtual Status Copy(void* to, const void* from, size_t bytes) = 0;
  // Writes 8 aligned bytes at once, each in turn, and may return before they are there.
  virtual Status WriteFlags(const std::vector<UcxFlag>& flags) = 0;
  // Returns when all flags that were written are there.
  virtual Status AwaitFlags() = 0;
};

struct UcxOptions {
  std::string folder;                              // has libucp.so.0; empty: the system's
  UcxSettings settings;                            // win over UCX_... in the environment
  std::shared_ptr<UcxDeviceMemory> device_memory;  // null: all registered memory is the host's
  UcxWay way = UcxWay::kDefault;                   // others are for tests
  double deadline_seconds = 30;  // for some put to a partner to arrive while any is in flight
};

// Any thread may use it, one at a time, with the GPU's context current where memory is on a GPU. It
// makes no progress by itself. Without RDMA (tcp, shared memory) puts are messages, which arrive in
// the partner's Progress.
Status MakeUcxNetwork(const UcxOptions& options, std::unique_ptr<Network>* network);

// Whether a folder has a UCX that serves; empty: the system's.
Status CheckUcx(const std::string& folder);

// Joins NVLink domains by UCX from now on. Call it before there are groups; only in builds with
// CUDA.
Status UseUcx(const std::string& folder);

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_NETWORK_UCX_UCX_H_
