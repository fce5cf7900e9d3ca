#include "ffi/handlers/targets.h"

#include <algorithm>

#include "ffi/handlers/operations.h"
#include "ffi/runtime/cuda/driver.h"
#include "ffi/runtime/groups/groups.h"
#include "ffi/runtime/groups/mailbox.h"

namespace jax_ep {

std::vector<Target> Targets() {
  std::vector<Target> targets;
  for (const auto& make : kAllHandlers) targets.push_back(make().target);
  return targets;
}

std::vector<StateType> StateTypes() {
  std::vector<StateType> types;
  for (const auto& make : kAllHandlers) {
    const StateType type = make().state;
    const auto is_same = [&](const StateType& other) { return other.type_id == type.type_id; };
    if (std::ranges::none_of(types, is_same)) types.push_back(type);
  }
  return types;
}

void PostReports() { Groups::OfProcess().PostReports(ProcessMailbox()); }

int64_t ReleaseWorkspaces() { return Groups::OfProcess().Release(); }

void Shutdown() { Groups::OfProcess().Shutdown(); }

std::string DriverProblem() { return CheckDriver(QueryCudaVersions()).message; }

}  // namespace jax_ep
