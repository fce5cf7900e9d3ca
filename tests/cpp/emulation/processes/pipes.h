// Messages between two processes of a test over a pair of pipes, which outlives neither.
#ifndef JAX_EP_TESTS_CPP_EMULATION_PROCESSES_PIPES_H_
#define JAX_EP_TESTS_CPP_EMULATION_PROCESSES_PIPES_H_

#include <poll.h>
#include <unistd.h>

#include <cstdint>
#include <string>

#include "ffi/runtime/transport/unique_fd.h"

namespace jax_ep::testing {

class Pipes {
 public:
  Pipes(int read_end, int write_end) : read_(read_end), write_(write_end) {}

  // Two that are connected with each other, for both sides of a fork.
  struct Pair;
  static Pair Make();

  void Send(const std::string& message) {
    const uint64_t size = message.size();
    const std::string bytes(reinterpret_cast<const char*>(&size), sizeof size);
    const std::string all = bytes + message;
    if (write(write_.get(), all.data(), all.size()) != static_cast<ssize_t>(all.size())) _exit(3);
  }

  bool HasMessage(int milliseconds = 0) {
    pollfd event = {read_.get(), POLLIN, 0};
    return poll(&event, 1, milliseconds) == 1 && (event.revents & POLLIN) != 0;
  }

  // Ends the process if none comes.
  std::string Receive() {
    uint64_t size = 0;
    Read(&size, sizeof size);
    std::string message(size, 0);
    Read(message.data(), size);
    return message;
  }

 private:
  void Read(void* bytes, size_t size) {
    auto* to = static_cast<char*>(bytes);
    while (size > 0) {
      const ssize_t got = HasMessage(20'000) ? read(read_.get(), to, size) : 0;
      if (got <= 0) _exit(3);
      to += got;
      size -= static_cast<size_t>(got);
    }
  }

  UniqueFd read_;
  UniqueFd write_;
};

struct Pipes::Pair {
  Pipes side[2];
};

inline Pipes::Pair Pipes::Make() {
  int one[2], other[2];
  if (pipe(one) != 0 || pipe(other) != 0) _exit(3);
  return {{Pipes(one[0], other[1]), Pipes(other[0], one[1])}};
}

}  // namespace jax_ep::testing

#endif  // JAX_EP_TESTS_CPP_EMULATION_PROCESSES_PIPES_H_
