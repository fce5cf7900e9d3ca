// The outcome of a host-side check. Handlers turn it into an ffi::Error; nothing here throws.
#ifndef JAX_EP_RUNTIME_STATUS_H_
#define JAX_EP_RUNTIME_STATUS_H_

#include <cstdint>
#include <sstream>
#include <string>
#include <utility>

namespace jax_ep {

enum class StatusCode : uint8_t { kOk, kInvalidArgument, kFailedPrecondition, kUnimplemented };

struct Status {
  StatusCode code = StatusCode::kOk;
  std::string message;

  bool ok() const { return code == StatusCode::kOk; }
};

template <typename... Parts>
std::string Concatenate(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

template <typename... Parts>
Status InvalidArgument(const Parts&... parts) {
  return {StatusCode::kInvalidArgument, Concatenate(parts...)};
}

template <typename... Parts>
Status FailedPrecondition(const Parts&... parts) {
  return {StatusCode::kFailedPrecondition, Concatenate(parts...)};
}

template <typename... Parts>
Status Unimplemented(const Parts&... parts) {
  return {StatusCode::kUnimplemented, Concatenate(parts...)};
}

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_STATUS_H_
