// The network by UCX: InfiniBand, RoCE, TCP, shared memory, and whatever else UCX knows.
#ifndef JAX_EP_RUNTIME_NETWORK_UCX_UCX_H_
#define JAX_EP_RUNTIME_NETWORK_UCX_UCX_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ffi/runtime/network/network.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

// UCX's settings without the prefix UCX_, such as {"TLS", "tcp,cuda_copy"}.
using UcxSettings = std::vector<std::pair<std::string, std::string>>;

struct UcxOptions {
  std::string folder;            // has libucp.so.0; empty: the system's
  UcxSettings settings;          // win over UCX_... in the environment
  double deadline_seconds = 30;  // for some put to a partner to arrive while any is in flight
};

// Any thread may use it, one at a time, with the GPU's context current where memory is on a GPU. It
// makes no progress by itself: puts that UCX carries out by active messages (tcp, shared memory)
// arrive in the partner's Progress.
Status MakeUcxNetwork(const UcxOptions& options, std::unique_ptr<Network>* network);

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_NETWORK_UCX_UCX_H_
