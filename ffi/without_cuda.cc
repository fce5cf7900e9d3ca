// The functions of a build without CUDA: there is nothing to register or to probe.
#include "ffi/handlers/targets.h"
#include "ffi/kernels/probe.h"
#include "ffi/runtime/network/nvshmem/nvshmem.h"
#include "ffi/runtime/network/ucx/ucx.h"
#include "ffi/runtime/profile/profile.h"

namespace jax_ep {

std::vector<Target> Targets() { return {}; }

std::vector<StateType> StateTypes() { return {}; }

void PostReports() {}
void Shutdown() {}

int64_t ReleaseWorkspaces() { return 0; }

std::string DriverProblem() { return {}; }

Status UseUcx(const std::string& /*folder*/) {
  return FailedPrecondition("this build has no CUDA kernels");
}

Status UseNvshmem(const std::string& /*folder*/) {
  return FailedPrecondition("this build has no CUDA kernels");
}

std::vector<ProbedDevice> ProbeDevices() { return {}; }

bool RecordsProfiles() { return false; }

Status StartProfile(const std::vector<int>& /*ordinals*/, int64_t /*max_records*/,
                    bool /*all_warps*/) {
  return FailedPrecondition("this build has no CUDA kernels");
}

Status StopProfile(std::vector<DeviceProfile>* /*profiles*/) { return {}; }

}  // namespace jax_ep
