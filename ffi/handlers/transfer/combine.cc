#include "ffi/handlers/transfer/transfer.h"

namespace jax_ep {
namespace {

void Decode(AttributeReader& reader, TransferConfig* config) {
  DecodePlanned(reader, config);
  reader.Read("has_scalars", &config->has_scalars);
}

// Returns expert outputs to the tokens' ranks, and sums them with their weights.
constexpr TransferStages kStages = {{kCombineTarget, Decode, CheckCombine},
                                    PrepareAs<PreparedCombine, PrepareCombine>};
constexpr TransferStages kStartStages = StartOf(kStages, kCombineStartTarget);

CombineBuffers Bind(const TransferConfig& config, const ffi::RemainingArgs& operands,
                    const ffi::RemainingRets& results) {
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
  return buffers;
}

// The trait promises that execute only launches kernels, so that CUDA graphs can capture it. A
// start launches in a stream that it would have to join again.
constexpr auto Execute = ExecuteTransfer<PreparedCombine, Bind>;

XLA_FFI_DEFINE_HANDLER(kInstantiate, InstantiateAs<kStages>, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, ExecuteBinding<TransferState>(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kInstantiateStart, InstantiateAs<kStartStages>, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kExecuteStart, Execute, ExecuteBinding<TransferState>());

}  // namespace

Handlers CombineHandlers() { return TransferHandlers(kCombineTarget, kInstantiate, kExecute); }

Handlers CombineStartHandlers() {
  return TransferHandlers(kCombineStartTarget, kInstantiateStart, kExecuteStart);
}

}  // namespace jax_ep
