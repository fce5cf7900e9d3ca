#include "ffi/handlers/transfer/transfer.h"

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

BulkCopyCeilingBuffers Bind(const TransferConfig& /*config*/, const ffi::RemainingArgs& operands,
                            const ffi::RemainingRets& results) {
  BulkCopyCeilingBuffers buffers;
  buffers.x = Addresses(operands).Next();
  buffers.status = Addresses(results).Next<int32_t>();
  return buffers;
}

constexpr auto Execute = ExecuteTransfer<PreparedBulkCopyCeiling, Bind>;

XLA_FFI_DEFINE_HANDLER(kInstantiate, InstantiateAs<kStages>, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, ExecuteBinding<TransferState>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

Handlers BulkCopyCeilingHandlers() {
  return TransferHandlers(kBulkCopyCeilingTarget, kInstantiate, kExecute);
}

}  // namespace jax_ep
