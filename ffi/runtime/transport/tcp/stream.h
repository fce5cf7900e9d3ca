// Messages between processes of different hosts, over TCP. Everyone on the network can connect: who
// does not begin with the listener's secret is not heard, and a stream that breaks the format ends.
//
// A stream is the secret, which only the process that connects sends, and messages: each has its
// length before it, as 4 bytes.
#ifndef JAX_EP_RUNTIME_TRANSPORT_TCP_STREAM_H_
#define JAX_EP_RUNTIME_TRANSPORT_TCP_STREAM_H_

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/runtime/settings.h"
#include "ffi/runtime/status.h"
#include "ffi/runtime/transport/connection.h"
#include "ffi/runtime/transport/unique_fd.h"

namespace jax_ep {

class Stream : public Connection {
 public:
  // `secret` has to come before the first message. `timeout` bounds how long a message takes from
  // its first byte to its last, and the first one from now.
  Stream(UniqueFd socket, std::string secret, std::chrono::nanoseconds timeout);

  int fd() const override { return socket_.get(); }
  Status Send(std::string_view bytes, const std::vector<int>& descriptors = {}) override;
  Status Receive(std::vector<Message>* messages) override;
  Clock::time_point deadline() const override { return deadline_; }

 private:
  friend Status ConnectStream(const std::string& address, std::string_view secret,
                              std::chrono::nanoseconds timeout,
                              std::shared_ptr<Connection>* connection);

  Status SendAll(std::string_view bytes);
  Status Split(std::vector<Message>* messages);
  Status Ended(int error) const;

  const UniqueFd socket_;
  const std::string other_end_;  // its address
  const std::chrono::nanoseconds timeout_;
  std::string secret_;  // empty once it has come
  std::string begun_;   // the next message, as far as it has come
  Clock::time_point deadline_ = Clock::time_point::max();

  std::mutex sending_;
  std::atomic<int> send_error_ = 0;  // the kernel reports an error once, to either side
};

// Connects with a listener at "10.0.0.1:4711" or "[fd00::1]:4711", within 5 s, and sends its
// secret. A network that delivers nothing for as long as `timeout` is cut.
Status ConnectStream(const std::string& address, std::string_view secret,
                     std::chrono::nanoseconds timeout, std::shared_ptr<Connection>* connection);

class StreamListener {
 public:
  // Takes a port of this host, and makes a secret.
  Status Open(const NetworkSettings& settings);

  // Takes the next connection, if there is one.
  Status Accept(std::shared_ptr<Connection>* connection) const;

  int fd() const { return socket_.get(); }
  const std::string& address() const { return address_; }
  const std::string& secret() const { return secret_; }

 private:
  UniqueFd socket_;
  std::string address_, secret_;
  std::chrono::nanoseconds timeout_{0};
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_TRANSPORT_TCP_STREAM_H_
