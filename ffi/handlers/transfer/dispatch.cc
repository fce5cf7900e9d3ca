#include "ffi/handlers/transfer/transfer.h"
#include "ffi/runtime/settings.h"

namespace jax_ep {
namespace {

void Decode(AttributeReader& reader, TransferConfig* config) {
  DecodePlanned(reader, config);
  reader.ReadOptional("is_quantized", &config->is_quantized);
}

// Sends x and topk_weights by topk_ids. Returns the rows of the local experts, and the plan.
constexpr TransferStages kStages = {{kDispatchTarget, Decode, CheckDispatch},
                                    PrepareAs<PreparedDispatch, PrepareDispatch>};

auto Instantiate(ffi::RemainingArgs operands, ffi::RemainingRets results,
                 ffi::Dictionary attributes) {
  return InstantiateTransfer(kStages, attributes, operands, results);
}

ffi::Error Execute(TransferState* state, cudaStream_t stream, int32_t device,
                   ffi::RemainingArgs operands, ffi::RemainingRets results) {
  if (IsAbsent(device)) return ffi::Error::Success();
  const TransferConfig& config = state->config;
  DispatchBuffers buffers;
  Addresses in(operands);
  buffers.x = in.Next();
  if (config.is_quantized) buffers.scales = in.Next<const float>();
  buffers.topk_ids = in.Next<const int32_t>();
  if (config.has_weights) buffers.topk_weights = in.Next<const float>();
  Addresses out(results);
  buffers.rows = out.Next();
  if (config.is_quantized) buffers.row_scales = out.Next<float>();
  if (config.has_weights) buffers.row_weights = out.Next<float>();
  buffers.plan = NextPlanResults(out);
  buffers.forwarding = NextForwardingResults(config, out);
  return ExecuteTransfer<PreparedDispatch>(*state, device, buffers, stream);
}

// The trait promises that execute only launches kernels, so that CUDA graphs can capture it.
XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, ExecuteBinding<TransferState>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

Handlers DispatchHandlers() { return TransferHandlers(kDispatchTarget, kInstantiate, kExecute); }

}  // namespace jax_ep
