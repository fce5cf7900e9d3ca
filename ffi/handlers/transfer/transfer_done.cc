#include "ffi/handlers/local.h"
#include "ffi/runtime/calls/in_flight.h"
#include "ffi/runtime/settings.h"

namespace jax_ep {
namespace {

// Makes XLA's stream wait for a transfer in flight. Its operands are all results of the start, the
// first of which it returns in the same memory, and then the operands of the start, which XLA keeps
// until then.
struct State {
  using Config = TransferDoneConfig;
  static constexpr const char* kName = "jax_ep.TransferDoneState.v1";
  inline static ffi::TypeId id = {};

  State(const char* target, Config config) : target(target), config(config) {}

  const char* target;
  Config config;
};

void Decode(AttributeReader& reader, TransferDoneConfig* config) {
  reader.Read("num_results", &config->num_results);
}

constexpr Contract<TransferDoneConfig, NoSizes> kContract = {kTransferDoneTarget, Decode,
                                                             CheckTransferDone};

auto Instantiate(ffi::RemainingArgs operands, ffi::RemainingRets results,
                 ffi::Dictionary attributes) {
  return InstantiateLocal<State>(kContract, attributes, operands, results);
}

ffi::Error Execute(State* state, cudaStream_t stream, int32_t device, ffi::RemainingArgs operands,
                   ffi::RemainingRets results) {
  if (IsAbsent(device)) return ffi::Error::Success();
  NoSizes sizes;
  Status status = CheckCallBuffers(&CheckTransferDone, state->config, operands, results, &sizes);
  if (!status.ok()) return ToError(status);
  // The start's order: its results, then its operands.
  BufferAddresses buffers;
  for (size_t i = 0; i < operands.size(); ++i) buffers.push_back(AddressOf(operands, i));
  for (size_t i = 0; i < results.size(); ++i) {
    if (AddressOf(results, i) == buffers[i]) continue;
    return ToError(FailedPrecondition(state->target, ": result ", i,
                                      " has other memory than that of the start; expected XLA to "
                                      "keep it, as the call asks for"));
  }
  return ToError(At(state->target, InFlightCalls::OfProcess().Join(device, stream, buffers)));
}

Status LoadNothing() { return {}; }

// Without the trait of dispatch: what joins a stream cannot be captured without its start.
XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, ExecuteBinding<State>());

}  // namespace

Handlers TransferDoneHandlers() {
  return LocalHandlers<State>(kTransferDoneTarget, LoadNothing, kInstantiate, kExecute);
}

}  // namespace jax_ep
