#include "ffi/runtime/transport/local/socket.h"

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

namespace jax_ep {
namespace {

constexpr int kType = SOCK_SEQPACKET | SOCK_CLOEXEC;
constexpr int kBacklog = 512;

Status Failed(const char* step) {
  return FailedPrecondition(step, ": ", std::strerror(errno), " (errno ", errno, ")");
}

// A name that begins with a zero byte is abstract.
Status ToAddress(std::string_view name, sockaddr_un* address, socklen_t* size) {
  *address = {};
  address->sun_family = AF_UNIX;
  if (name.size() + 1 > sizeof address->sun_path) {
    return InvalidArgument("the socket's name ", name, " is too long");
  }
  std::memcpy(address->sun_path + 1, name.data(), name.size());
  *size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return {};
}

Status Open(UniqueFd* made) {
  *made = UniqueFd(socket(AF_UNIX, kType, 0));
  if (!made->is_open()) return Failed("making a socket");
  return {};
}

// Refuses processes of other users.
Status CheckUser(int connection) {
  ucred other = {};
  socklen_t size = sizeof other;
  if (getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &other, &size) != 0) {
    return Failed("asking whose process is connected");
  }
  if (other.uid == geteuid()) return {};
  return FailedPrecondition("it is a process of user ", other.uid, "; expected user ", geteuid());
}

// Bounds how long connecting and sending may take.
void SetDeadline(int fd) {
  const timeval deadline = {kSendSeconds, 0};
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &deadline, sizeof deadline);
}

}  // namespace

Status Listen(std::string_view name, UniqueFd* listener) {
  sockaddr_un address;
  socklen_t size = 0;
  Status status = ToAddress(name, &address, &size);
  if (status.ok()) status = Open(listener);
  if (!status.ok()) return status;
  if (bind(listener->get(), reinterpret_cast<const sockaddr*>(&address), size) != 0) {
    return Failed("naming a socket");
  }
  if (listen(listener->get(), kBacklog) != 0) return Failed("listening at a socket");
  return {};
}

Status Connect(std::string_view name, UniqueFd* connection) {
  sockaddr_un address;
  socklen_t size = 0;
  Status status = ToAddress(name, &address, &size);
  if (status.ok()) status = Open(connection);
  if (!status.ok()) return status;
  SetDeadline(connection->get());
  while (connect(connection->get(), reinterpret_cast<const sockaddr*>(&address), size) != 0) {
    if (errno != EINTR) return Failed("connecting to its socket");
  }
  return CheckUser(connection->get());
}

Status Accept(int listener, UniqueFd* connection) {
  *connection = UniqueFd(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
  if (!connection->is_open()) return Failed("accepting a connection");
  SetDeadline(connection->get());
  return CheckUser(connection->get());
}

Status Send(int connection, std::string_view bytes, const std::vector<int>& descriptors) {
  if (descriptors.size() > kMaxDescriptors || bytes.size() > kMaxMessageBytes) {
    return InvalidArgument("a message has ", bytes.size(), " bytes and ", descriptors.size(),
                           " descriptors; there may be ", kMaxMessageBytes, " and ",
                           kMaxDescriptors);
  }
  iovec part = {const_cast<char*>(bytes.data()), bytes.size()};
  msghdr header = {};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))] = {};
  if (!descriptors.empty()) {
    const size_t size = descriptors.size() * sizeof(int);
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(size);
    cmsghdr* const rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(size);
    std::memcpy(CMSG_DATA(rights), descriptors.data(), size);
  }
  while (sendmsg(connection, &header, MSG_NOSIGNAL) < 0) {
    if (errno == EPIPE || errno == ECONNRESET) return {};
    if (errno != EINTR) return Failed("sending a message");
  }
  return {};
}

Status Receive(int connection, Message* message, bool* ended) {
  *ended = false;
  message->descriptors.clear();
  message->bytes.resize(kMaxMessageBytes);
  iovec part = {message->bytes.data(), message->bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))];
  msghdr header = {};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  ssize_t received;
  do {
    received = recvmsg(connection, &header, MSG_CMSG_CLOEXEC);
    // The kernel reports once that the other process has left messages unread, before its own.
  } while (received < 0 && (errno == EINTR || errno == ECONNRESET));
  if (received == 0) {
    message->bytes.clear();
    *ended = true;
    return {};
  }
  if (received < 0) return Failed("receiving a message");
  message->bytes.resize(static_cast<size_t>(received));
  for (cmsghdr* part = CMSG_FIRSTHDR(&header); part; part = CMSG_NXTHDR(&header, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof fd, sizeof fd);
      message->descriptors.emplace_back(fd);
    }
  }
  if (header.msg_flags & MSG_CTRUNC) {
    return FailedPrecondition("receiving descriptors: too many files are open in this process");
  }
  return {};
}

Status LocalConnection::Send(std::string_view bytes, const std::vector<int>& descriptors) {
  return jax_ep::Send(fd(), bytes, descriptors);
}

Status LocalConnection::Receive(std::vector<Message>* messages) {
  Message message;
  bool ended = false;
  messages->clear();
  Status status = jax_ep::Receive(fd(), &message, &ended);
  if (!status.ok()) return FailedPrecondition("cannot be heard any more: ", status.message);
  if (ended) {
    return FailedPrecondition("has died: it has closed its socket without exiting in order");
  }
  messages->push_back(std::move(message));
  return {};
}

}  // namespace jax_ep
