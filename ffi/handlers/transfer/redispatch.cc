#include "ffi/handlers/transfer/transfer.h"
#include "ffi/runtime/settings.h"

namespace jax_ep {
namespace {

void Decode(AttributeReader& reader, TransferConfig* config) {
  DecodePlanned(reader, config);
  reader.ReadOptional("is_quantized", &config->is_quantized);
}

// Sends x and topk_weights along a plan, without an exchange of ids and counts.
constexpr TransferStages kStages = {{kRedispatchTarget, Decode, CheckRedispatch},
                                    PrepareAs<PreparedRedispatch, PrepareRedispatch>};

auto Instantiate(ffi::RemainingArgs operands, ffi::RemainingRets results,
                 ffi::Dictionary attributes) {
  return InstantiateTransfer(kStages, attributes, operands, results);
}

ffi::Error Execute(TransferState* state, cudaStream_t stream, int32_t device,
                   ffi::RemainingArgs operands, ffi::RemainingRets results) {
  if (IsAbsent(device)) return ffi::Error::Success();
  const TransferConfig& config = state->config;
  RedispatchBuffers buffers;
  Addresses in(operands);
  buffers.x = in.Next();
  if (config.is_quantized) buffers.scales = in.Next<const float>();
  buffers.plan = NextPlanOperands(in);
  buffers.forwarding = NextForwardingOperands(config, in);
  if (config.has_weights) buffers.topk_weights = in.Next<const float>();
  Addresses out(results);
  buffers.rows = out.Next();
  if (config.is_quantized) buffers.row_scales = out.Next<float>();
  if (config.has_weights) buffers.row_weights = out.Next<float>();
  return ExecuteTransfer<PreparedRedispatch>(*state, device, buffers, stream);
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, ExecuteBinding<TransferState>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

Handlers RedispatchHandlers() {
  return TransferHandlers(kRedispatchTarget, kInstantiate, kExecute);
}

}  // namespace jax_ep
