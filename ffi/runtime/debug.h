// Says what groups over processes decide, and how long each step has taken: on stderr, if
// JAX_EP_DEBUG is set.
#ifndef JAX_EP_RUNTIME_DEBUG_H_
#define JAX_EP_RUNTIME_DEBUG_H_

#include <unistd.h>

#include <chrono>
#include <cstdio>

#include "ffi/runtime/settings.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

template <typename... Parts>
void Debug(const Parts&... parts) {
  if (!DebugIsOn()) return;
  std::fprintf(stderr, "%s\n", Concatenate("jax_ep[", getpid(), "]: ", parts...).c_str());
}

class Stopwatch {
 public:
  // Returns "12.3 ms" since the last call, or since the beginning.
  std::string Lap() {
    const auto now = std::chrono::steady_clock::now();
    const double milliseconds = std::chrono::duration<double, std::milli>(now - last_).count();
    last_ = now;
    char text[32];
    std::snprintf(text, sizeof text, "%.1f ms", milliseconds);
    return text;
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_DEBUG_H_
