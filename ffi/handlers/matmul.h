// The state and the stages that all grouped matmuls share. They do not communicate.
#ifndef JAX_EP_HANDLERS_MATMUL_H_
#define JAX_EP_HANDLERS_MATMUL_H_

#include <cstdint>
#include <memory>
#include <utility>

#include "ffi/handlers/call.h"
#include "ffi/kernels/matmul/launch.h"
#include "ffi/runtime/tile_counter.h"

namespace jax_ep {

// The state of a call site, as TransferState.
template <typename CallConfig>
struct MatmulState {
  using Config = CallConfig;
  inline static ffi::TypeId id = {};

  MatmulState(const char* target, Config config) : target(target), config(std::move(config)) {}

  const char* target;
  Config config;
  // One counter is enough: a device runs a call site's launches one after another.
  const TileCounter tile_counter;
};
using GroupedMatmulState = MatmulState<GroupedMatmulConfig>;
using GroupedMatmulQuantizedState = MatmulState<GroupedMatmulQuantizedConfig>;
using GroupedMatmulQuantizedActivationState = MatmulState<GroupedMatmulQuantizedActivationConfig>;
using GroupedMatmulActivationState = MatmulState<GroupedMatmulActivationConfig>;

inline Status At(const char* target, Status status) {
  if (!status.ok()) status.message = Concatenate(target, ": ", status.message);
  return status;
}

template <typename State, typename Sizes>
ffi::ErrorOr<std::unique_ptr<State>> InstantiateMatmul(
    const char* target, BufferCheck<typename State::Config, Sizes> check,
    const ffi::Dictionary& attributes, const ffi::RemainingArgs& operands,
    const ffi::RemainingRets& results) {
  typename State::Config config;
  const Status status = CheckInstantiate(target, check, attributes, operands, results, &config);
  if (!status.ok()) return ToError(status);
  return std::make_unique<State>(target, std::move(config));
}

// Runs once per execution and device, before any device launches.
template <typename State>
ffi::Error PrepareMatmul(State* state, int32_t device) {
  return ToError(At(state->target, LoadMatmulsOnce(device)));
}

template <typename State>
ffi::Error InitializeMatmul(State* /*state*/) {
  return ffi::Error::Success();
}

// Completes an operation's stages by the shared prepare and initialize.
template <typename State>
Target MatmulTarget(const char* name, XLA_FFI_Handler* instantiate, XLA_FFI_Handler* execute) {
  XLA_FFI_DEFINE_HANDLER(
      prepare, PrepareMatmul<State>,
      ffi::Ffi::BindPrepare().Ctx<ffi::State<State>>().template Ctx<ffi::DeviceOrdinal>());
  XLA_FFI_DEFINE_HANDLER(initialize, InitializeMatmul<State>,
                         ffi::Ffi::BindInitialize().Ctx<ffi::State<State>>());
  return {name, Address(instantiate), Address(prepare), Address(initialize), Address(execute)};
}

}  // namespace jax_ep

#endif  // JAX_EP_HANDLERS_MATMUL_H_
