// The custom-call targets of this build, without any XLA type, for the Python module.
#ifndef JAX_EP_HANDLERS_TARGETS_H_
#define JAX_EP_HANDLERS_TARGETS_H_

#include <cstdint>
#include <string>
#include <vector>

namespace jax_ep {

// Handlers of the four stages, as the pointers that JAX wants in capsules.
struct Target {
  const char* name;
  void* instantiate;
  void* prepare;
  void* initialize;
  void* execute;
};

// A type of state that instantiate hands to the later stages.
struct StateType {
  const char* name;
  void* type_id;
  void* type_info;
};

// Both are empty in a build without CUDA.
std::vector<Target> Targets();
std::vector<StateType> StateTypes();

// Moves what devices have reported since to the mailbox of the process.
void PostReports();

// Frees the device workspaces of this process and starts a new generation; returns their bytes.
int64_t ReleaseWorkspaces();

// What instantiate would say about the driver: why the kernels cannot run, or "". In a build
// without CUDA there is nothing to say.
std::string DriverProblem();

}  // namespace jax_ep

#endif  // JAX_EP_HANDLERS_TARGETS_H_
