// Messages between processes of one host: Unix-domain sockets that keep message boundaries, and
// pass file descriptors. Their names are abstract: no file is left behind.
#ifndef JAX_EP_RUNTIME_TRANSPORT_LOCAL_SOCKET_H_
#define JAX_EP_RUNTIME_TRANSPORT_LOCAL_SOCKET_H_

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi/runtime/status.h"
#include "ffi/runtime/transport/connection.h"
#include "ffi/runtime/transport/unique_fd.h"

namespace jax_ep {

// The kernel passes no more descriptors at once.
inline constexpr size_t kMaxDescriptors = 253;

// Makes a socket that accepts connections under this name.
Status Listen(std::string_view name, UniqueFd* listener);

// Fails at once if nobody listens under this name in this network namespace, or a process of
// another user does.
Status Connect(std::string_view name, UniqueFd* connection);

// Takes the next connection. Refuses processes of other users.
Status Accept(int listener, UniqueFd* connection);

// Waits for at most kSendSeconds. It is no error if the other process has closed its end, or died:
// Receive tells of it.
Status Send(int connection, std::string_view bytes, const std::vector<int>& descriptors = {});

// Blocks until there is a message. Sets `ended` if the other process has closed its end, or died,
// and there are no more messages.
Status Receive(int connection, Message* message, bool* ended);

class LocalConnection : public Connection {
 public:
  explicit LocalConnection(UniqueFd socket) : socket_(std::move(socket)) {}

  int fd() const override { return socket_.get(); }
  Status Send(std::string_view bytes, const std::vector<int>& descriptors) override;
  Status Receive(std::vector<Message>* messages) override;

 private:
  const UniqueFd socket_;
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_TRANSPORT_LOCAL_SOCKET_H_
