// The custom-call targets of this build, without any XLA type, for the Python module.
#ifndef JAX_EP_HANDLERS_TARGETS_H_
#define JAX_EP_HANDLERS_TARGETS_H_

#include <cstdint>
#include <string>
#include <vector>

namespace jax_ep {

// A custom call: the handlers of its four stages, as pointers for JAX's capsules.
struct Target {
  const char* name;
  void* instantiate;
  void* prepare;
  void* initialize;
  void* execute;
};

// The type of a state that instantiate passes to the later stages.
struct StateType {
  const char* name;
  void* type_id;
  void* type_info;
};

// Both are empty in a build without CUDA.
std::vector<Target> Targets();
std::vector<StateType> StateTypes();

// Posts new reports of the devices to the mailbox of the process.
void PostReports();

// Frees the device workspaces of this process and starts a new generation; returns their bytes.
int64_t ReleaseWorkspaces();

// Ends calls that wait for a peer that will not come, and waits for the devices: at exit.
void Shutdown();

// Why the installed driver cannot run the kernels, or "". Always "" in a build without CUDA.
std::string DriverProblem();

}  // namespace jax_ep

#endif  // JAX_EP_HANDLERS_TARGETS_H_
