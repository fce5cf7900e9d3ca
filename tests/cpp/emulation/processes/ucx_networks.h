// Joins the NVLink domains of this process's groups, which may be in other processes, by UCX.
#ifndef JAX_EP_TESTS_CPP_EMULATION_PROCESSES_UCX_NETWORKS_H_
#define JAX_EP_TESTS_CPP_EMULATION_PROCESSES_UCX_NETWORKS_H_

#include <memory>
#include <string>

#include "ffi/runtime/network/networks.h"
#include "ffi/runtime/network/ucx/ucx.h"
#include "tests/cpp/emulation/programs/dispatch_program.h"

namespace jax_ep::testing {

// Call it in a fork, before it has groups. `folder` has libucp.
inline void UseUcx(const std::string& folder) {
  DispatchProgram::rail_slots = 0;  // a group knows the rings of its rails
  Networks::OfProcess().Use([folder](int /*device*/, std::unique_ptr<Network>* network) {
    return MakeUcxNetwork(
        {.folder = folder, .settings = {{"TLS", "tcp,self"}, {"NET_DEVICES", "lo"}}}, network);
  });
}

}  // namespace jax_ep::testing

#endif  // JAX_EP_TESTS_CPP_EMULATION_PROCESSES_UCX_NETWORKS_H_
