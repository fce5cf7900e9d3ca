// A connection with another process: by a socket of this host, or over a network.
#ifndef JAX_EP_RUNTIME_TRANSPORT_CONNECTION_H_
#define JAX_EP_RUNTIME_TRANSPORT_CONNECTION_H_

#include <chrono>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/runtime/status.h"
#include "ffi/runtime/transport/unique_fd.h"

namespace jax_ep {

inline constexpr size_t kMaxMessageBytes = 16 * 1024;
// The receiver takes its messages at once, whatever else it does.
inline constexpr int kSendSeconds = 5;

struct Message {
  std::string bytes;
  std::vector<UniqueFd> descriptors;  // none over a network
};

class Connection {
 public:
  using Clock = std::chrono::steady_clock;

  virtual ~Connection() = default;

  // For poll and close.
  virtual int fd() const = 0;

  // Thread-safe. Waits for at most kSendSeconds. It is no error if the other process has closed its
  // end, or died: Receive tells of it.
  virtual Status Send(std::string_view bytes, const std::vector<int>& descriptors) = 0;

  // Takes messages that have come, once poll has found some. One thread calls it. After an error
  // nothing comes any more; it says what has happened to the other process, as "has died".
  virtual Status Receive(std::vector<Message>* messages) = 0;

  // When to call Receive although nothing comes.
  virtual Clock::time_point deadline() const { return Clock::time_point::max(); }
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_TRANSPORT_CONNECTION_H_
