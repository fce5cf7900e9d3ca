// The stages that all operations share which do not communicate. Their state is a target and a
// configuration.
#ifndef JAX_EP_HANDLERS_LOCAL_H_
#define JAX_EP_HANDLERS_LOCAL_H_

#include <cstdint>
#include <memory>
#include <utility>

#include "ffi/handlers/call.h"
#include "ffi/handlers/operations.h"

namespace jax_ep {

inline Status At(const char* target, Status status) {
  if (!status.ok()) status.message = Concatenate(target, ": ", status.message);
  return status;
}

template <typename State, typename Sizes>
ffi::ErrorOr<std::unique_ptr<State>> InstantiateLocal(
    const Contract<typename State::Config, Sizes>& contract, const ffi::Dictionary& attributes,
    const ffi::RemainingArgs& operands, const ffi::RemainingRets& results) {
  typename State::Config config;
  const Status status = CheckInstantiate(contract, attributes, operands, results, &config);
  if (!status.ok()) return ToError(status);
  return std::make_unique<State>(contract.target, std::move(config));
}

// Runs once per execution and device, before any device launches.
template <typename State>
ffi::Error PrepareLocal(State* state, int32_t device) {
  return ToError(At(state->target, LoadLocalKernelsOnce(device)));
}

template <typename State>
ffi::Error InitializeLocal(State* /*state*/) {
  return ffi::Error::Success();
}

// Completes an operation's stages by the shared prepare and initialize.
template <typename State>
Handlers LocalHandlers(const char* target, Status (*load_kernels)(), XLA_FFI_Handler* instantiate,
                       XLA_FFI_Handler* execute) {
  XLA_FFI_DEFINE_HANDLER(
      prepare, PrepareLocal<State>,
      ffi::Ffi::BindPrepare().Ctx<ffi::State<State>>().template Ctx<ffi::DeviceOrdinal>());
  XLA_FFI_DEFINE_HANDLER(initialize, InitializeLocal<State>,
                         ffi::Ffi::BindInitialize().Ctx<ffi::State<State>>());
  return {{target, Address(instantiate), Address(prepare), Address(initialize), Address(execute)},
          MakeStateType<State>(State::kName),
          load_kernels};
}

}  // namespace jax_ep

#endif  // JAX_EP_HANDLERS_LOCAL_H_
