#include "ffi/handlers/transfer/transfer.h"
#include "ffi/runtime/settings.h"

namespace jax_ep {
namespace {

void Decode(AttributeReader& reader, TransferConfig* config) {
  DecodeTransfer(reader, config);
  reader.Read("repeats", &config->repeats);
  config->num_experts = config->group_size;
  reader.ReadOptional("is_quantized", &config->is_quantized);
}

// Sends rows to all other ranks by bulk copies, as fast as the links carry them. Benchmarks alone
// use it.
constexpr TransferStages kStages = {{kBulkCopyCeilingTarget, Decode, CheckBulkCopyCeiling},
                                    PrepareAs<PreparedBulkCopyCeiling, PrepareBulkCopyCeiling>};

auto Instantiate(ffi::RemainingArgs operands, ffi::RemainingRets results,
                 ffi::Dictionary attributes) {
  return InstantiateTransfer(kStages, attributes, operands, results);
}

ffi::Error Execute(TransferState* state, cudaStream_t stream, int32_t device,
                   ffi::RemainingArgs operands, ffi::RemainingRets results) {
  if (IsAbsent(device)) return ffi::Error::Success();
  BulkCopyCeilingBuffers buffers;
  buffers.x = Addresses(operands).Next();
  buffers.status = Addresses(results).Next<int32_t>();
  return ExecuteTransfer<PreparedBulkCopyCeiling>(*state, device, buffers, stream);
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, ExecuteBinding<TransferState>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

Handlers BulkCopyCeilingHandlers() {
  return TransferHandlers(kBulkCopyCeilingTarget, kInstantiate, kExecute);
}

}  // namespace jax_ep
