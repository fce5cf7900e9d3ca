#include "ffi/handlers/transfer/transfer.h"

namespace jax_ep {
namespace {

void Decode(AttributeReader& reader, TransferConfig* config) {
  DecodePlanned(reader, config);
  reader.ReadOptional("is_quantized", &config->is_quantized);
}

// Sends x and topk_weights along a plan, without an exchange of ids and counts.
constexpr TransferStages kStages = {{kRedispatchTarget, Decode, CheckRedispatch},
                                    PrepareAs<PreparedRedispatch, PrepareRedispatch>};
constexpr TransferStages kStartStages = StartOf(kStages, kRedispatchStartTarget);

RedispatchBuffers Bind(const TransferConfig& config, const ffi::RemainingArgs& operands,
                       const ffi::RemainingRets& results) {
  RedispatchBuffers buffers;
  Addresses in(operands);
  buffers.x = in.Next();
  if (config.is_quantized) buffers.scales = in.Next();
  buffers.plan = NextPlanOperands(in);
  buffers.forwarding = NextForwardingOperands(config, in);
  if (config.has_weights) buffers.topk_weights = in.Next<const float>();
  Addresses out(results);
  buffers.rows = out.Next();
  if (config.is_quantized) buffers.row_scales = out.Next();
  if (config.has_weights) buffers.row_weights = out.Next<float>();
  return buffers;
}

// The trait promises that execute only launches kernels, so that CUDA graphs can capture it. A
// start launches in a stream that it would have to join again.
constexpr auto Execute = ExecuteTransfer<PreparedRedispatch, Bind>;

XLA_FFI_DEFINE_HANDLER(kInstantiate, InstantiateAs<kStages>, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, ExecuteBinding<TransferState>(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kInstantiateStart, InstantiateAs<kStartStages>, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kExecuteStart, Execute, ExecuteBinding<TransferState>());

}  // namespace

Handlers RedispatchHandlers() {
  return TransferHandlers(kRedispatchTarget, kInstantiate, kExecute);
}

Handlers RedispatchStartHandlers() {
  return TransferHandlers(kRedispatchStartTarget, kInstantiateStart, kExecuteStart);
}

}  // namespace jax_ep
