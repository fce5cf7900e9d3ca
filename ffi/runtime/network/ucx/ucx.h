// The network by UCX: InfiniBand, RoCE, TCP, shared memory, and whatever else UCX knows.
#ifndef JAX_EP_RUNTIME_NETWORK_UCX_UCX_H_
#define JAX_EP_RUNTIME_NETWORK_UCX_UCX_H_

#include <memory>
#include <string>

#include "ffi/runtime/network/network.h"
#include "ffi/runtime/network/ucx/worker.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

struct UcxOptions {
  std::string folder;            // of libucp.so.0; if empty, the system's
  UcxSettings settings;          // what the environment's UCX_... variables do not say already
  double deadline_seconds = 30;  // for some put to a partner to arrive while any is in flight
};

// Any thread may use it, one at a time: it makes no progress by itself. Puts that UCX carries out
// by active messages (tcp, shared memory) arrive in the partner's Progress.
Status MakeUcxNetwork(const UcxOptions& options, std::unique_ptr<Network>* network);

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_NETWORK_UCX_UCX_H_
