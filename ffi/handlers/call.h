// What all handlers share: reading a call, its state, and XLA's types turned into those of
// runtime/.
#ifndef JAX_EP_HANDLERS_CALL_H_
#define JAX_EP_HANDLERS_CALL_H_

#include <cuda_runtime_api.h>

#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi/handlers/targets.h"
#include "ffi/runtime/buffers.h"
#include "ffi/runtime/config.h"
#include "ffi/runtime/driver.h"
#include "ffi/runtime/signatures.h"
#include "ffi/runtime/status.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

namespace ffi = ::xla::ffi;

// What instantiate makes of a call site and the later stages read. All local devices share it.
template <typename Config>
struct CallState {
  static ffi::TypeId id;  // filled when JAX registers the type

  const char* target;
  Config config;
};

using TransferState = CallState<TransferConfig>;
using GroupedMatmulState = CallState<GroupedMatmulConfig>;

ffi::Error ToError(const Status& status);

// Operands or results. They refer to the call frame and are not to be kept.
std::vector<BufferView> Views(const ffi::RemainingArgs& operands);
std::vector<BufferView> Views(const ffi::RemainingRets& results);

// All attributes must be known and present, with their exact types. Ends with CheckConfig.
Status DecodeConfig(std::string_view target, const ffi::Dictionary& attributes,
                    TransferConfig* config);
Status DecodeConfig(std::string_view target, const ffi::Dictionary& attributes,
                    GroupedMatmulConfig* config);

// This version reads and checks calls but has no kernels to run them. An operation that gets its
// kernels drops this line from Instantiate below and from its execute handler.
Status NoKernels(std::string_view target);

template <typename Config, typename Sizes>
using BufferCheck = Status (*)(const Config& config, Buffers operands, Buffers results,
                               Sizes* sizes);

template <typename Config, typename Sizes>
Status CheckCallBuffers(BufferCheck<Config, Sizes> check, const Config& config,
                        const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
                        Sizes* sizes) {
  return check(config, Views(operands), Views(results), sizes);
}

// The instantiate stage of every operation. What is wrong with a call is said here, where it
// becomes an exception of the compilation; an error on one device later would end the process.
template <typename Config, typename Sizes>
ffi::ErrorOr<std::unique_ptr<CallState<Config>>> InstantiateCall(
    const char* target, BufferCheck<Config, Sizes> check, const ffi::Dictionary& attributes,
    const ffi::RemainingArgs& operands, const ffi::RemainingRets& results) {
  Config config;
  Status status = DecodeConfig(target, attributes, &config);
  // Some runtimes show no buffers in this stage; execute checks them again.
  if (Sizes sizes; status.ok() && operands.size() > 0) {
    status = CheckCallBuffers(check, config, operands, results, &sizes);
  }
  if (status.ok()) {
    status = CheckDriver(QueryCudaVersions());
    if (!status.ok()) status.message = Concatenate(target, ": ", status.message);
  }
  if (status.ok()) status = NoKernels(target);
  if (!status.ok()) return ToError(status);
  return std::make_unique<CallState<Config>>(CallState<Config>{target, std::move(config)});
}

inline auto InstantiateBinding() {
  return ffi::Ffi::BindInstantiate().RemainingArgs().RemainingRets().Attrs();
}

template <typename Config>
auto ExecuteBinding() {
  return ffi::Ffi::BindExecute()
      .Ctx<ffi::State<CallState<Config>>>()
      .template Ctx<ffi::PlatformStream<cudaStream_t>>()
      .template Ctx<ffi::DeviceOrdinal>()
      .RemainingArgs()
      .RemainingRets();
}

inline void* Address(XLA_FFI_Handler* handler) { return reinterpret_cast<void*>(handler); }

}  // namespace jax_ep

#endif  // JAX_EP_HANDLERS_CALL_H_
