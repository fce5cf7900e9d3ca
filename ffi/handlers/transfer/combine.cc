#include "ffi/handlers/transfer/transfer.h"
#include "ffi/runtime/settings.h"

namespace jax_ep {
namespace {

void Decode(AttributeReader& reader, TransferConfig* config) {
  DecodePlanned(reader, config);
  reader.Read("has_scalars", &config->has_scalars);
}

// Returns expert outputs to the tokens' ranks, and sums them with their weights.
constexpr TransferStages kStages = {{kCombineTarget, Decode, CheckCombine},
                                    PrepareAs<PreparedCombine, PrepareCombine>};

auto Instantiate(ffi::RemainingArgs operands, ffi::RemainingRets results,
                 ffi::Dictionary attributes) {
  return InstantiateTransfer(kStages, attributes, operands, results);
}

ffi::Error Execute(TransferState* state, cudaStream_t stream, int32_t device,
                   ffi::RemainingArgs operands, ffi::RemainingRets results) {
  if (IsAbsent(device)) return ffi::Error::Success();
  const TransferConfig& config = state->config;
  CombineBuffers buffers;
  Addresses in(operands);
  buffers.y = in.Next();
  buffers.plan = NextPlanOperands(in);
  buffers.forwarding = NextForwardingOperands(config, in);
  if (config.has_weights) buffers.row_weights = in.Next<const float>();
  if (config.has_scalars) buffers.row_scalars = in.Next<const float>();
  Addresses out(results);
  buffers.out = out.Next();
  if (config.has_scalars) buffers.assignment_scalars = out.Next<float>();
  return ExecuteTransfer<PreparedCombine>(*state, device, buffers, stream);
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, ExecuteBinding<TransferState>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

Handlers CombineHandlers() { return TransferHandlers(kCombineTarget, kInstantiate, kExecute); }

}  // namespace jax_ep
