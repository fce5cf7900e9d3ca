// Shared by all handlers: a call's attributes, buffers and state, from XLA's types to those of
// runtime/.
#ifndef JAX_EP_HANDLERS_CALL_H_
#define JAX_EP_HANDLERS_CALL_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi/handlers/targets.h"
#include "ffi/runtime/buffers.h"
#include "ffi/runtime/call_site.h"
#include "ffi/runtime/config.h"
#include "ffi/runtime/driver.h"
#include "ffi/runtime/signatures.h"
#include "ffi/runtime/status.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

namespace ffi = ::xla::ffi;

// The state of a call site: instantiate makes it, the later stages read it. All local devices share
// it.
struct TransferState {
  using Config = TransferConfig;
  static ffi::TypeId id;  // filled when JAX registers the type

  TransferState(const char* target, Config config);

  const char* target;
  Config config;
  CallSite site;
};

ffi::Error ToError(const Status& status);

// Views of operands or results. They refer to the call frame: do not keep them.
std::vector<BufferView> Views(const ffi::RemainingArgs& operands);
std::vector<BufferView> Views(const ffi::RemainingRets& results);

// Reads all attributes, and checks them by CheckConfig. Each must be known and present, with its
// exact type.
Status DecodeConfig(std::string_view target, const ffi::Dictionary& attributes,
                    TransferConfig* config);
Status DecodeConfig(std::string_view target, const ffi::Dictionary& attributes,
                    GroupedMatmulConfig* config);
Status DecodeConfig(std::string_view target, const ffi::Dictionary& attributes,
                    GroupedMatmulActivationConfig* config);

// Loads the kernels of all grouped matmuls on a device. Later calls return at once: loading at
// every execution would cost as much as a small matmul.
Status LoadMatmulsOnce(int32_t device);

// Loads all kernels of this build on the current device.
Status LoadAllKernels();

// The addresses of operands or results, in their order.
class Addresses {
 public:
  explicit Addresses(const ffi::RemainingArgs& operands);
  explicit Addresses(const ffi::RemainingRets& results);

  template <typename T = void>
  T* Next() {
    return static_cast<T*>(addresses_[next_++]);
  }
  void Skip(size_t count) { next_ += count; }

 private:
  std::vector<void*> addresses_;
  size_t next_ = 0;
};

template <typename Config, typename Sizes>
using BufferCheck = Status (*)(const Config& config, Buffers operands, Buffers results,
                               Sizes* sizes);

template <typename Config, typename Sizes>
Status CheckCallBuffers(BufferCheck<Config, Sizes> check, const Config& config,
                        const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
                        Sizes* sizes) {
  return check(config, Views(operands), Views(results), sizes);
}

// The instantiate stage of every operation. It makes all checks, because its errors become
// exceptions of the compilation; a later error on one device would end the process.
template <typename State, typename Sizes>
ffi::ErrorOr<std::unique_ptr<State>> InstantiateCall(
    const char* target, BufferCheck<typename State::Config, Sizes> check,
    const ffi::Dictionary& attributes, const ffi::RemainingArgs& operands,
    const ffi::RemainingRets& results) {
  typename State::Config config;
  Status status = DecodeConfig(target, attributes, &config);
  // Some runtimes pass no buffers to this stage; execute checks them again.
  if (Sizes sizes; status.ok() && operands.size() > 0) {
    status = CheckCallBuffers(check, config, operands, results, &sizes);
  }
  if (status.ok()) {
    status = CheckDriver(QueryCudaVersions());
    if (!status.ok()) status.message = Concatenate(target, ": ", status.message);
  }
  if (!status.ok()) return ToError(status);
  return std::make_unique<State>(target, std::move(config));
}

inline auto InstantiateBinding() {
  return ffi::Ffi::BindInstantiate().RemainingArgs().RemainingRets().Attrs();
}

template <typename State>
auto ExecuteBinding() {
  return ffi::Ffi::BindExecute()
      .Ctx<ffi::State<State>>()
      .template Ctx<ffi::PlatformStream<cudaStream_t>>()
      .template Ctx<ffi::DeviceOrdinal>()
      .RemainingArgs()
      .RemainingRets();
}

inline void* Address(XLA_FFI_Handler* handler) { return reinterpret_cast<void*>(handler); }

}  // namespace jax_ep

#endif  // JAX_EP_HANDLERS_CALL_H_
