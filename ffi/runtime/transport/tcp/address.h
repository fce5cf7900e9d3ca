// IP addresses: those of this host, and those at which other processes listen.
#ifndef JAX_EP_RUNTIME_TRANSPORT_TCP_ADDRESS_H_
#define JAX_EP_RUNTIME_TRANSPORT_TCP_ADDRESS_H_

#include <sys/socket.h>

#include <cstdint>
#include <string>

#include "ffi/runtime/status.h"

namespace jax_ep {

// An IP address and a port.
class SocketAddress {
 public:
  SocketAddress() = default;
  explicit SocketAddress(const sockaddr& address);

  // Reads what ToString writes.
  static Status Parse(const std::string& text, SocketAddress* address);
  // "10.0.0.1:4711" or "[fd00::1]:4711"
  std::string ToString() const;

  void SetPort(uint16_t port);
  int family() const { return storage_.ss_family; }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t size() const;
  bool HasSameIp(const SocketAddress& other) const;

 private:
  sockaddr_storage storage_ = {};
};

// Chooses an address of this host for processes of other hosts, without a port: the first one of
// the interface with this name, IPv4 before IPv6. Without a name: the address of the default route,
// else of the first interface that is no loopback, else of loopback.
Status FindOwnAddress(const std::string& interface_name, SocketAddress* address);

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_TRANSPORT_TCP_ADDRESS_H_
