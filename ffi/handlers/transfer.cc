#include "ffi/handlers/transfer.h"

#include <cstdint>

#include "ffi/handlers/collectives.h"

namespace jax_ep {
namespace {

// Once an execution and device, before any device launches. The place to request the communicator
// of state->config.Groups(), load kernels and allocate the workspace.
ffi::Error Prepare(TransferState* state, int32_t /*device*/, ffi::RunId /*run*/,
                   Communicator /*communicator*/) {
  return ToError(NoKernels(state->target));
}

// After all communicators were acquired, before all devices meet. The place to get the
// communicator and exchange addresses.
ffi::Error Initialize(TransferState* state, cudaStream_t /*stream*/, int32_t /*device*/,
                      ffi::RunId /*run*/, Communicator /*communicator*/) {
  return ToError(NoKernels(state->target));
}

XLA_FFI_DEFINE_HANDLER(kPrepare, Prepare,
                       ffi::Ffi::BindPrepare()
                           .Ctx<ffi::State<TransferState>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Ctx<ffi::RunId>()
                           .Ctx<ffi::Extension<Collectives>>());

XLA_FFI_DEFINE_HANDLER(kInitialize, Initialize,
                       ffi::Ffi::BindInitialize()
                           .Ctx<ffi::State<TransferState>>()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Ctx<ffi::RunId>()
                           .Ctx<ffi::Extension<Collectives>>());

}  // namespace

Target TransferTarget(const char* name, XLA_FFI_Handler* instantiate, XLA_FFI_Handler* execute) {
  return {name, Address(instantiate), Address(kPrepare), Address(kInitialize), Address(execute)};
}

}  // namespace jax_ep
