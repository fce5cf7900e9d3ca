// Joins the NVLink domains of all groups by networks on which puts land late, and in any order.
#ifndef JAX_EP_TESTS_CPP_EMULATION_RUNTIME_LATE_NETWORKS_H_
#define JAX_EP_TESTS_CPP_EMULATION_RUNTIME_LATE_NETWORKS_H_

#include <memory>
#include <mutex>
#include <vector>

#include "ffi/runtime/network/networks.h"
#include "tests/cpp/emulation/programs/dispatch_program.h"
#include "tests/cpp/gpu/transfer/late_network.h"

namespace jax_ep::testing {

class LateNetworks {
 public:
  // Call it before there are groups.
  static void Use() {
    DispatchProgram::rail_slots = 0;  // a group knows the rings of its rails
    Networks::OfProcess().Use([](int device, std::unique_ptr<Network>* network) {
      cudaSetDevice(device);
      made_.push_back(new harness::LateNetwork(device));
      network->reset(made_.back());
      return Status{};
    });
  }

  static uint64_t num_puts() {
    uint64_t sum = 0;
    for (const harness::LateNetwork* network : made_) sum += network->num_puts();
    return sum;
  }

 private:
  static inline std::vector<harness::LateNetwork*> made_;  // they live until the process ends
};

}  // namespace jax_ep::testing

#endif  // JAX_EP_TESTS_CPP_EMULATION_RUNTIME_LATE_NETWORKS_H_
