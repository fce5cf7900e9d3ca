// Runs a kernel of one thread on every GPU, to see whether this build has code for it.
#ifndef JAX_EP_KERNELS_PROBE_H_
#define JAX_EP_KERNELS_PROBE_H_

#include <string>
#include <vector>

namespace jax_ep {

struct ProbedDevice {
  int ordinal = 0;
  std::string name;
  std::string compute_capability;  // "9.0"
  std::string driver_version;      // the newest CUDA the driver supports, "13.0"
  std::string architecture;        // the code that ran, "sm_90a"; empty if none did
  std::string error;               // why none did; empty if it did
};

// Empty on a machine without a driver or a GPU, and in a build without CUDA. Never fails. Creates a
// CUDA context on every visible GPU and leaves the calling thread's current device as it was.
std::vector<ProbedDevice> ProbeDevices();

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_PROBE_H_
