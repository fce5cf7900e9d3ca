#include "ffi/handlers/targets.h"

#include "ffi/handlers/call.h"
#include "ffi/handlers/matmul.h"
#include "ffi/handlers/operations.h"
#include "ffi/handlers/quantize.h"
#include "ffi/handlers/transfer.h"
#include "ffi/runtime/groups/groups.h"
#include "ffi/runtime/groups/mailbox.h"

namespace jax_ep {
namespace {

template <typename State>
StateType MakeStateType(const char* name) {
  static XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<State>();
  return {name, &State::id, &info};
}

}  // namespace

std::vector<Target> Targets() {
  return {DispatchHandlers(),
          RedispatchHandlers(),
          CombineHandlers(),
          BulkCopyCeilingHandlers(),
          GroupedMatmulHandlers(),
          GroupedMatmulRhsGradientHandlers(),
          GroupedMatmulQuantizedHandlers(),
          GroupedMatmulQuantizedActivationHandlers(),
          GroupedMatmulActivationHandlers(),
          GroupedMatmulActivationGradientHandlers(),
          QuantizeHandlers(),
          QuantizeWeightsHandlers()};
}

std::vector<StateType> StateTypes() {
  return {MakeStateType<TransferState>("jax_ep.TransferState.v1"),
          MakeStateType<GroupedMatmulState>("jax_ep.GroupedMatmulState.v1"),
          MakeStateType<GroupedMatmulQuantizedState>("jax_ep.GroupedMatmulQuantizedState.v1"),
          MakeStateType<GroupedMatmulQuantizedActivationState>(
              "jax_ep.GroupedMatmulQuantizedActivationState.v1"),
          MakeStateType<GroupedMatmulActivationState>("jax_ep.GroupedMatmulActivationState.v1"),
          MakeStateType<QuantizeState>("jax_ep.QuantizeState.v1"),
          MakeStateType<QuantizeWeightsState>("jax_ep.QuantizeWeightsState.v1")};
}

void PostReports() { Groups::OfProcess().PostReports(ProcessMailbox()); }

int64_t ReleaseWorkspaces() { return Groups::OfProcess().Release(); }

void Shutdown() { Groups::OfProcess().Shutdown(); }

std::string DriverProblem() { return CheckDriver(QueryCudaVersions()).message; }

}  // namespace jax_ep
