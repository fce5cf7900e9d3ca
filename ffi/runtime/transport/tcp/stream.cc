#include "ffi/runtime/transport/tcp/stream.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

#include "ffi/runtime/transport/identity.h"
#include "ffi/runtime/transport/tcp/address.h"

namespace jax_ep {
namespace {

using std::chrono::nanoseconds;

constexpr int kBacklog = 512;
constexpr int kConnectMilliseconds = 5000;
constexpr size_t kReadBytes = 32 * 1024;

Status Failed(const std::string& step, int error) {
  return FailedPrecondition(step, ": ", std::strerror(error), " (errno ", error, ")");
}

void SetOption(int fd, int level, int option, int value) {
  setsockopt(fd, level, option, &value, sizeof value);
}

// Ends a stream whose other host does not answer, whether something is in flight or not.
void WatchNetwork(int fd, nanoseconds timeout) {
  constexpr int kProbes = 3;
  const auto milliseconds =
      std::max<int64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(timeout).count(), 1);
  const int most = static_cast<int>(std::min<int64_t>(milliseconds, 1'000'000));
  const int period = std::max(most / (kProbes + 1) / 1000, 1);
  SetOption(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPIDLE, period);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPINTVL, period);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPCNT, kProbes);
  SetOption(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, most);
  SetOption(fd, IPPROTO_TCP, TCP_NODELAY, 1);
}

bool IsEndOfPeer(int error) { return error == 0 || error == ECONNRESET || error == EPIPE; }

// Takes as long for all texts.
bool IsSecret(std::string_view text, std::string_view secret) {
  unsigned char difference = 0;
  for (size_t i = 0; i < secret.size(); ++i) {
    difference = static_cast<unsigned char>(difference | (text[i] ^ secret[i]));
  }
  return difference == 0;
}

// The address of the other end, while there is one.
std::string AddressOfPeer(int fd) {
  sockaddr_storage address = {};
  socklen_t size = sizeof address;
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0 ||
      (address.ss_family != AF_INET && address.ss_family != AF_INET6)) {
    return "?";
  }
  return SocketAddress(reinterpret_cast<const sockaddr&>(address)).ToString();
}

// Connects a socket that does not block.
int ConnectWithin(int fd, const SocketAddress& to, int milliseconds) {
  if (connect(fd, to.get(), to.size()) == 0) return 0;
  if (errno != EINPROGRESS && errno != EINTR) return errno;
  const auto deadline = Connection::Clock::now() + std::chrono::milliseconds(milliseconds);
  while (true) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Connection::Clock::now());
    pollfd writable = {fd, POLLOUT, 0};
    const int found = poll(&writable, 1, std::max(static_cast<int>(left.count()), 0));
    if (found == 0) return ETIMEDOUT;
    if (found > 0) break;
    if (errno != EINTR) return errno;
  }
  int error = 0;
  socklen_t size = sizeof error;
  getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
  return error;
}

}  // namespace

Stream::Stream(UniqueFd socket, std::string secret, nanoseconds timeout)
    : socket_(std::move(socket)),
      other_end_(AddressOfPeer(fd())),
      timeout_(timeout),
      secret_(std::move(secret)),
      deadline_(secret_.empty() ? Clock::time_point::max() : Clock::now() + timeout) {
  const auto most = std::chrono::duration_cast<std::chrono::microseconds>(
      std::min<nanoseconds>(timeout, std::chrono::seconds(kSendSeconds)));
  const timeval deadline = {most.count() / 1'000'000, most.count() % 1'000'000};
  setsockopt(fd(), SOL_SOCKET, SO_SNDTIMEO, &deadline, sizeof deadline);
}

Status Stream::Send(std::string_view bytes, const std::vector<int>& descriptors) {
  if (!descriptors.empty() || bytes.size() > kMaxMessageBytes) {
    return InvalidArgument("a message to another host has ", bytes.size(), " bytes and ",
                           descriptors.size(), " descriptors; there may be ", kMaxMessageBytes,
                           " and none");
  }
  const auto size = static_cast<uint32_t>(bytes.size());
  std::string message(reinterpret_cast<const char*>(&size), sizeof size);
  return SendAll(message.append(bytes));
}

Status Stream::SendAll(std::string_view bytes) {
  const std::lock_guard lock(sending_);
  while (!bytes.empty() && send_error_ == 0) {
    const ssize_t sent = send(fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent >= 0) {
      bytes.remove_prefix(static_cast<size_t>(sent));
    } else if (errno == EAGAIN) {
      // Half a message may be in flight: nothing can follow it.
      send_error_ = ETIMEDOUT;
      shutdown(fd(), SHUT_RDWR);
      return Failed("sending a message", ETIMEDOUT);
    } else if (errno != EINTR) {
      send_error_ = errno;
    }
  }
  return {};
}

Status Stream::Receive(std::vector<Message>* messages) {
  messages->clear();
  std::array<char, kReadBytes> bytes;
  const ssize_t received = recv(fd(), bytes.data(), bytes.size(), MSG_DONTWAIT);
  if (received == 0) return Ended(send_error_);
  if (received > 0) {
    begun_.append(bytes.data(), static_cast<size_t>(received));
  } else if (errno != EAGAIN && errno != EINTR) {
    return Ended(errno);
  }
  Status status = Split(messages);
  if (!messages->empty()) deadline_ = Clock::time_point::max();
  const auto now = Clock::now();
  if (!begun_.empty()) deadline_ = std::min(deadline_, now + timeout_);
  if (status.ok() && now >= deadline_) {
    return FailedPrecondition(
        "cannot be understood: it has sent half a message, and not the rest "
        "within ",
        std::chrono::duration<double>(timeout_).count(), " s (JAX_EP_NETWORK_TIMEOUT_S)");
  }
  return status;
}

// Takes whole messages off what has come.
Status Stream::Split(std::vector<Message>* messages) {
  size_t used = 0;
  if (!secret_.empty()) {
    if (begun_.size() < secret_.size()) return {};
    if (!IsSecret(begun_, secret_)) return FailedPrecondition("does not know the secret");
    used = secret_.size();
    secret_.clear();
  }
  uint32_t size = 0;
  while (begun_.size() - used >= sizeof size) {
    std::memcpy(&size, begun_.data() + used, sizeof size);
    if (size > kMaxMessageBytes) {
      return FailedPrecondition("cannot be understood: it has begun a message of ", size,
                                " bytes; there may be ", kMaxMessageBytes);
    }
    if (begun_.size() - used - sizeof size < size) break;
    messages->push_back({begun_.substr(used + sizeof size, size), {}});
    used += sizeof size + size;
  }
  begun_.erase(0, used);
  return {};
}

Status Stream::Ended(int error) const {
  if (IsEndOfPeer(error)) {
    return FailedPrecondition("has died: it has closed its socket without exiting in order");
  }
  return FailedPrecondition("has died, or the network to its host is cut: ", other_end_, ": ",
                            std::strerror(error));
}

Status ConnectStream(const std::string& address, std::string_view secret, nanoseconds timeout,
                     std::shared_ptr<Connection>* connection) {
  SocketAddress to;
  if (Status status = SocketAddress::Parse(address, &to); !status.ok()) return status;
  UniqueFd made(socket(to.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!made.is_open()) return Failed("making a socket", errno);
  if (const int error = ConnectWithin(made.get(), to, kConnectMilliseconds); error != 0) {
    return Failed(Concatenate("connecting to ", address), error);
  }
  fcntl(made.get(), F_SETFL, fcntl(made.get(), F_GETFL) & ~O_NONBLOCK);
  WatchNetwork(made.get(), timeout);
  const auto stream = std::make_shared<Stream>(std::move(made), "", timeout);
  *connection = stream;
  return stream->SendAll(secret);
}

Status StreamListener::Open(const NetworkSettings& settings) {
  SocketAddress address;
  Status status = FindOwnAddress(settings.interface_name, &address);
  if (!status.ok()) return status;
  int error = 0;
  for (uint32_t port = settings.first_port; port <= settings.last_port; ++port) {
    address.SetPort(static_cast<uint16_t>(port));
    UniqueFd made(socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!made.is_open()) return Failed("making a socket", errno);
    SetOption(made.get(), SOL_SOCKET, SO_REUSEADDR, 1);  // old connections keep no port
    sockaddr_storage own = {};
    socklen_t size = sizeof own;
    if (bind(made.get(), address.get(), address.size()) == 0 && listen(made.get(), kBacklog) == 0 &&
        getsockname(made.get(), reinterpret_cast<sockaddr*>(&own), &size) == 0) {
      secret_.resize(Identity::kSecretBytes);
      if (getrandom(secret_.data(), secret_.size(), 0) != static_cast<ssize_t>(secret_.size())) {
        return Failed("making a secret", errno);
      }
      address_ = SocketAddress(reinterpret_cast<const sockaddr&>(own)).ToString();
      timeout_ = nanoseconds(settings.silence_deadline_ns);
      socket_ = std::move(made);
      return {};
    }
    error = errno;
    if (error != EADDRINUSE) break;
  }
  return Failed(Concatenate("listening at ", address.ToString(), ", the last of the ports ",
                            settings.first_port, " to ", settings.last_port,
                            " (JAX_EP_NETWORK_INTERFACE, JAX_EP_NETWORK_PORTS)"),
                error);
}

Status StreamListener::Accept(std::shared_ptr<Connection>* connection) const {
  UniqueFd accepted(accept4(fd(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!accepted.is_open()) return Failed("accepting a connection", errno);
  WatchNetwork(accepted.get(), timeout_);
  *connection = std::make_shared<Stream>(std::move(accepted), secret_, timeout_);
  return {};
}

}  // namespace jax_ep
