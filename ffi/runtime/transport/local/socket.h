// Messages between processes of one host: Unix-domain sockets that keep message boundaries, and
// pass file descriptors. Their names are abstract: no file is left behind.
#ifndef JAX_EP_RUNTIME_TRANSPORT_LOCAL_SOCKET_H_
#define JAX_EP_RUNTIME_TRANSPORT_LOCAL_SOCKET_H_

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/runtime/status.h"
#include "ffi/runtime/transport/unique_fd.h"

namespace jax_ep {

// The kernel passes no more descriptors at once.
inline constexpr size_t kMaxDescriptors = 253;
inline constexpr size_t kMaxMessageBytes = 16 * 1024;

struct Message {
  std::string bytes;
  std::vector<UniqueFd> descriptors;
};

// Makes a socket that accepts connections under this name.
Status Listen(std::string_view name, UniqueFd* listener);

// Fails at once if nobody listens under this name in this network namespace, or a process of
// another user does.
Status Connect(std::string_view name, UniqueFd* connection);

// Takes the next connection. Refuses processes of other users.
Status Accept(int listener, UniqueFd* connection);

// Waits for at most 5 s: the receiver takes its messages at once, whatever else it does. It is no
// error if the other process has closed its end, or died: Receive tells of it.
Status Send(int connection, std::string_view bytes, const std::vector<int>& descriptors = {});

// Blocks until there is a message. Sets `ended` if the other process has closed its end, or died,
// and there are no more messages.
Status Receive(int connection, Message* message, bool* ended);

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_TRANSPORT_LOCAL_SOCKET_H_
