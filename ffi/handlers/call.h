// Shared by all handlers: a call's attributes, buffers and state, from XLA's types to those of
// runtime/calls/.
#ifndef JAX_EP_HANDLERS_CALL_H_
#define JAX_EP_HANDLERS_CALL_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "ffi/handlers/attributes.h"
#include "ffi/handlers/targets.h"
#include "ffi/runtime/calls/buffers.h"
#include "ffi/runtime/calls/config.h"
#include "ffi/runtime/calls/signatures.h"
#include "ffi/runtime/cuda/driver.h"
#include "ffi/runtime/status.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

namespace ffi = ::xla::ffi;

ffi::Error ToError(const Status& status);

// Views of operands or results. They refer to the call frame: do not keep them.
std::vector<BufferView> Views(const ffi::RemainingArgs& operands);
std::vector<BufferView> Views(const ffi::RemainingRets& results);

inline void* AddressOf(const ffi::RemainingArgs& operands, size_t index) {
  return operands.get<ffi::AnyBuffer>(index)->untyped_data();
}
inline void* AddressOf(const ffi::RemainingRets& results, size_t index) {
  return (**results.get<ffi::AnyBuffer>(index)).untyped_data();
}

// The addresses of operands or results, in their order. The call has been checked: all are there.
template <typename List>
class Addresses {
 public:
  explicit Addresses(const List& buffers) : buffers_(buffers) {}

  template <typename T = void>
  T* Next() {
    return static_cast<T*>(AddressOf(buffers_, next_++));
  }
  void Skip(size_t count) { next_ += count; }

 private:
  const List& buffers_;
  size_t next_ = 0;
};

// The addresses of all results, then of all operands.
std::vector<const void*> ResultsAndOperands(const ffi::RemainingArgs& operands,
                                            const ffi::RemainingRets& results);

template <typename Config, typename Sizes>
using BufferCheck = Status (*)(const Config& config, Buffers operands, Buffers results,
                               Sizes* sizes);

// How instantiate reads and checks a call.
template <typename CallConfig, typename CallSizes>
struct Contract {
  using Config = CallConfig;
  using Sizes = CallSizes;

  const char* target;
  // Reads all attributes. Each must be known and present, with its exact type, unless it is read as
  // an optional one.
  void (*decode)(AttributeReader& reader, Config* config);
  BufferCheck<Config, Sizes> check;
};

template <typename Config, typename Sizes>
Status CheckCallBuffers(BufferCheck<Config, Sizes> check, const Config& config,
                        const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
                        Sizes* sizes) {
  return check(config, Views(operands), Views(results), sizes);
}

// The checks of instantiate. It makes all of them, because its errors become exceptions of the
// compilation; a later error on one device would end the process.
template <typename Config, typename Sizes>
Status CheckInstantiate(const Contract<Config, Sizes>& contract, const ffi::Dictionary& attributes,
                        const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
                        Config* config) {
  AttributeReader reader(contract.target, attributes);
  contract.decode(reader, config);
  Status status = reader.Finish();
  if (status.ok()) status = CheckConfig(contract.target, *config);
  // Some runtimes pass no buffers to this stage; a later one checks them again.
  if (Sizes sizes; status.ok() && operands.size() > 0) {
    status = CheckCallBuffers(contract.check, *config, operands, results, &sizes);
  }
  if (status.ok()) {
    status = CheckDriver(QueryCudaVersions());
    if (!status.ok()) status.message = Concatenate(contract.target, ": ", status.message);
  }
  return status;
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

template <typename State>
StateType MakeStateType(const char* name) {
  static XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<State>();
  return {name, &State::id, &info};
}

inline void* Address(XLA_FFI_Handler* handler) { return reinterpret_cast<void*>(handler); }

}  // namespace jax_ep

#endif  // JAX_EP_HANDLERS_CALL_H_
