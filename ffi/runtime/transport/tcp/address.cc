#include "ffi/runtime/transport/tcp/address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <set>
#include <vector>

#include "ffi/runtime/transport/unique_fd.h"

namespace jax_ep {
namespace {

// Addresses of documentation: nothing is sent to them.
constexpr const char* kElsewhere[] = {"192.0.2.1:9", "[2001:db8::1]:9"};

struct OwnAddress {
  std::string interface_name;
  bool is_loopback;
  SocketAddress address;
};

bool IsUsable(const ifaddrs& entry) {
  if (entry.ifa_addr == nullptr || (entry.ifa_flags & IFF_UP) == 0) return false;
  if (entry.ifa_addr->sa_family == AF_INET) return true;
  if (entry.ifa_addr->sa_family != AF_INET6) return false;
  // A link-local address means nothing without an interface of the other host.
  const auto* const address = reinterpret_cast<const sockaddr_in6*>(entry.ifa_addr);
  return !IN6_IS_ADDR_LINKLOCAL(&address->sin6_addr);
}

// Interfaces that are up, IPv4 before IPv6.
std::vector<OwnAddress> OwnAddresses() {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) return {};
  std::vector<OwnAddress> found;
  for (const ifaddrs* entry = first; entry != nullptr; entry = entry->ifa_next) {
    if (!IsUsable(*entry)) continue;
    found.push_back(
        {entry->ifa_name, (entry->ifa_flags & IFF_LOOPBACK) != 0, SocketAddress(*entry->ifa_addr)});
  }
  freeifaddrs(first);
  std::stable_sort(found.begin(), found.end(), [](const OwnAddress& a, const OwnAddress& b) {
    return a.address.family() == AF_INET && b.address.family() != AF_INET;
  });
  return found;
}

// The address from which this host would send to another one, by the default route.
bool FindSource(const char* elsewhere, SocketAddress* source) {
  SocketAddress to;
  if (!SocketAddress::Parse(elsewhere, &to).ok()) return false;
  const UniqueFd socket_of_route(socket(to.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_storage own = {};
  socklen_t size = sizeof own;
  if (connect(socket_of_route.get(), to.get(), to.size()) != 0 ||
      getsockname(socket_of_route.get(), reinterpret_cast<sockaddr*>(&own), &size) != 0) {
    return false;
  }
  *source = SocketAddress(*reinterpret_cast<const sockaddr*>(&own));
  return true;
}

}  // namespace

SocketAddress::SocketAddress(const sockaddr& address) {
  std::memcpy(&storage_, &address,
              address.sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
}

socklen_t SocketAddress::size() const {
  return family() == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
}

Status SocketAddress::Parse(const std::string& text, SocketAddress* address) {
  const size_t colon = text.rfind(':');
  const bool is_ipv6 = text.starts_with('[');
  if (colon != std::string::npos && (!is_ipv6 || (colon >= 2 && text[colon - 1] == ']'))) {
    const std::string ip = is_ipv6 ? text.substr(1, colon - 2) : text.substr(0, colon);
    const char* const end = text.data() + text.size();
    uint16_t port = 0;
    const auto [read_to, error] = std::from_chars(text.data() + colon + 1, end, port);
    address->storage_ = {};
    address->storage_.ss_family = is_ipv6 ? AF_INET6 : AF_INET;
    void* const to =
        is_ipv6
            ? static_cast<void*>(&reinterpret_cast<sockaddr_in6*>(&address->storage_)->sin6_addr)
            : &reinterpret_cast<sockaddr_in*>(&address->storage_)->sin_addr;
    if (error == std::errc() && read_to == end &&
        inet_pton(address->family(), ip.c_str(), to) == 1) {
      address->SetPort(port);
      return {};
    }
  }
  return InvalidArgument("\"", text,
                         "\" is no address; expected one as 10.0.0.1:4711 or [fd00::1]:4711");
}

std::string SocketAddress::ToString() const {
  char ip[INET6_ADDRSTRLEN] = {};
  if (family() == AF_INET) {
    const auto& address = reinterpret_cast<const sockaddr_in&>(storage_);
    inet_ntop(AF_INET, &address.sin_addr, ip, sizeof ip);
    return Concatenate(ip, ":", ntohs(address.sin_port));
  }
  const auto& address = reinterpret_cast<const sockaddr_in6&>(storage_);
  inet_ntop(AF_INET6, &address.sin6_addr, ip, sizeof ip);
  return Concatenate("[", ip, "]:", ntohs(address.sin6_port));
}

void SocketAddress::SetPort(uint16_t port) {
  if (family() == AF_INET) {
    reinterpret_cast<sockaddr_in&>(storage_).sin_port = htons(port);
  } else {
    reinterpret_cast<sockaddr_in6&>(storage_).sin6_port = htons(port);
  }
}

bool SocketAddress::HasSameIp(const SocketAddress& other) const {
  SocketAddress a = *this, b = other;
  a.SetPort(0);
  b.SetPort(0);
  return a.ToString() == b.ToString();
}

Status FindOwnAddress(const std::string& interface_name, SocketAddress* address) {
  const std::vector<OwnAddress> all = OwnAddresses();
  const auto choose = [&](const auto& is_it) {
    const auto found = std::find_if(all.begin(), all.end(), is_it);
    if (found != all.end()) *address = found->address;
    if (found != all.end()) address->SetPort(0);
    return found != all.end();
  };
  if (!interface_name.empty()) {
    if (choose([&](const OwnAddress& own) { return own.interface_name == interface_name; })) {
      return {};
    }
    std::set<std::string> names;
    for (const OwnAddress& own : all) names.insert(own.interface_name);
    std::string list;
    for (const std::string& name : names) list += Concatenate(list.empty() ? "" : ", ", name);
    return InvalidArgument("JAX_EP_NETWORK_INTERFACE is \"", interface_name,
                           "\"; expected an interface that is up and has an address, one of ", list,
                           ", or nothing for that of the default route");
  }
  for (const char* const elsewhere : kElsewhere) {
    SocketAddress source;
    if (FindSource(elsewhere, &source) && choose([&](const OwnAddress& own) {
          return !own.is_loopback && own.address.HasSameIp(source);
        })) {
      return {};
    }
  }
  if (choose([](const OwnAddress& own) { return !own.is_loopback; })) return {};
  if (choose([](const OwnAddress&) { return true; })) return {};
  return FailedPrecondition("no network interface of this host is up");
}

}  // namespace jax_ep
