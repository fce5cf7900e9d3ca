// The CPUs on which a GPU's network thread runs: by default those next to the GPU.
#ifndef JAX_EP_RUNTIME_NETWORK_THREAD_CPUS_H_
#define JAX_EP_RUNTIME_NETWORK_THREAD_CPUS_H_

#include <string>
#include <vector>

#include "ffi/runtime/status.h"

namespace jax_ep {

// JAX_EP_NETWORK_CPUS. An error says what it may be.
struct NetworkCpus {
  bool are_near_the_gpu = true;
  std::vector<int> given;  // if not near the GPU; none for "any"
};
Status ReadNetworkCpus(NetworkCpus* cpus);

// Reads a list as Linux writes it, "0-3,8"; false if it is none.
bool ParseCpus(const std::string& text, std::vector<int>* cpus);

// Returns the CPUs of the NUMA node of a PCI device, such as "0000:1b:00.0"; none if Linux does not
// say. `folder` is that of all PCI devices.
std::vector<int> CpusNear(const std::string& pci_device,
                          const std::string& folder = "/sys/bus/pci/devices");

// Lets the calling thread run on those CPUs only, of which it may use some now. Otherwise it keeps
// what it has: the user has bound the process to other CPUs. Returns whether it is bound.
bool BindThread(const std::vector<int>& cpus);

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_NETWORK_THREAD_CPUS_H_
