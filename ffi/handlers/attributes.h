// Reads the attributes of a custom call, each once, into a config.
#ifndef JAX_EP_HANDLERS_ATTRIBUTES_H_
#define JAX_EP_HANDLERS_ATTRIBUTES_H_

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "ffi/runtime/calls/config.h"
#include "ffi/runtime/status.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

// Reads attributes one by one, and keeps the first error: an attribute that is missing, or has
// another type.
class AttributeReader {
 public:
  AttributeReader(std::string_view target, const ::xla::ffi::Dictionary& attributes)
      : target_(target), attributes_(attributes) {}

  template <typename T>
  void Read(const char* name, T* value) {
    ++num_read_;
    if (!status_.ok()) return;
    auto decoded = attributes_.get<T>(name);
    if (decoded.has_value()) {
      *value = *decoded;
    } else {
      status_ = InvalidArgument(target_, ": attribute ", name, " cannot be read (",
                                decoded.error().message(),
                                "); the caller and this build of jax_ep have different versions");
    }
  }

  // Leaves the default if the attribute is absent: programs exported before it existed lack it.
  template <typename T>
  void ReadOptional(const char* name, T* value) {
    if (attributes_.contains(name)) Read(name, value);
  }

  void Read(const char* name, std::vector<int64_t>* values) {
    ::xla::ffi::Span<const int64_t> span;
    Read(name, &span);
    values->assign(span.begin(), span.end());
  }

  void Read(const char* name, Activation* activation) {
    std::string_view text;
    Read(name, &text);
    if (!status_.ok() || ParseActivation(text, activation)) return;
    status_ = InvalidArgument(target_, ": there is no activation ", text,
                              "; the caller and this build of jax_ep have different versions");
  }

  // Call it last. Returns the first error, or one about attributes that nobody has read.
  Status Finish() const {
    if (status_.ok() && attributes_.size() != num_read_) {
      return InvalidArgument(target_, ": there are ", attributes_.size(), " attributes; expected ",
                             num_read_,
                             "; the caller and this build of jax_ep have different versions");
    }
    return status_;
  }

 private:
  std::string_view target_;
  const ::xla::ffi::Dictionary& attributes_;
  size_t num_read_ = 0;
  Status status_;
};

}  // namespace jax_ep

#endif  // JAX_EP_HANDLERS_ATTRIBUTES_H_
