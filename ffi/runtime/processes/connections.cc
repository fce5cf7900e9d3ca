#include "ffi/runtime/processes/connections.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

namespace jax_ep {
namespace {

constexpr std::chrono::seconds kConnectDeadline{30};
// A process that has died before it connected listens no more.
constexpr std::chrono::milliseconds kProbePeriod{200};

Status SendFrame(int connection, const Frame::Header& header, const std::string& bytes,
                 const std::vector<int>& descriptors = {}) {
  std::string message(reinterpret_cast<const char*>(&header), sizeof header);
  return Send(connection, message + bytes, descriptors);
}

bool Decode(Message message, Frame* frame) {
  if (message.bytes.size() < sizeof frame->header) return false;
  std::memcpy(&frame->header, message.bytes.data(), sizeof frame->header);
  frame->bytes = message.bytes.substr(sizeof frame->header);
  frame->descriptors = std::move(message.descriptors);
  return true;
}

}  // namespace

Connections& Connections::OfProcess() {
  static auto* const connections = new Connections;
  return *connections;
}

Status Connections::Address(std::string* address) {
  const std::lock_guard lock(mutex_);
  if (!listener_.is_open()) {
    const Identity self = ThisProcess();
    address_ = Concatenate("jax_ep-", self.pid, "-", std::hex, self.process);
    if (Status status = Listen(address_, &listener_); !status.ok()) return status;
    wake_ = UniqueFd(eventfd(0, EFD_CLOEXEC));
    if (!wake_.is_open()) return FailedPrecondition("no eventfd: too many files are open");
    std::thread([this] { Run(); }).detach();
  }
  *address = address_;
  return {};
}

Status Connections::ConnectWith(const Identity& other) {
  const std::lock_guard one_at_a_time(connecting_);
  const uint64_t self = ThisProcess().process;
  {
    std::unique_lock lock(mutex_);
    const auto is_known = [&] {
      return connections_.contains(other.process) || ended_.contains(other.process);
    };
    if (is_known()) return {};
    if (self > other.process) {
      const auto deadline = std::chrono::steady_clock::now() + kConnectDeadline;
      while (std::chrono::steady_clock::now() < deadline) {
        if (changed_.wait_for(lock, kProbePeriod, is_known)) return {};
        UniqueFd probe;
        if (Status status = Connect(other.address, &probe); !status.ok()) return status;
      }
      return FailedPrecondition("it has not connected to the socket ", address_, " within ",
                                kConnectDeadline.count(), " s");
    }
  }
  UniqueFd connection;
  Status status = Connect(other.address, &connection);
  if (status.ok()) {
    status = SendFrame(connection.get(), {.kind = Frame::Kind::kHello, .group = self}, "");
  }
  if (status.ok()) Add(other.process, std::make_shared<UniqueFd>(std::move(connection)));
  return status;
}

Status Connections::Send(uint64_t process, const Frame::Header& header, const std::string& bytes,
                         const std::vector<int>& descriptors) {
  Connection connection;
  {
    const std::lock_guard lock(mutex_);
    const auto found = connections_.find(process);
    if (found == connections_.end()) return FailedPrecondition("it has closed the connection");
    connection = found->second;
  }
  return SendFrame(connection->get(), header, bytes, descriptors);
}

void Connections::Subscribe(uint64_t group, Receiver* receiver) {
  const std::lock_guard delivery(delivery_);
  receivers_[group] = receiver;
  for (auto& [process, frame] : early_[group]) receiver->OnFrame(process, std::move(frame));
  early_.erase(group);
  std::map<uint64_t, bool> ended;
  {
    const std::lock_guard lock(mutex_);
    ended = ended_;
  }
  for (const auto& [process, in_order] : ended) receiver->OnEnd(process, in_order);
}

void Connections::Leave() {
  std::map<uint64_t, Connection> connections;
  {
    const std::lock_guard lock(mutex_);
    connections = connections_;
  }
  for (const auto& [process, connection] : connections) {
    static_cast<void>(SendFrame(connection->get(), {.kind = Frame::Kind::kLeave}, ""));
  }
}

void Connections::Add(uint64_t process, Connection connection) {
  const std::lock_guard lock(mutex_);
  connections_[process] = std::move(connection);
  changed_.notify_all();
  Wake();
}

// Makes the thread look at the new connections.
void Connections::Wake() const {
  const uint64_t one = 1;
  static_cast<void>(!write(wake_.get(), &one, sizeof one));
}

void Connections::Run() {
  while (true) {
    std::map<uint64_t, Connection> connections;
    std::vector<Connection> unnamed;
    {
      const std::lock_guard lock(mutex_);
      connections = connections_;
      unnamed = unnamed_;
    }
    std::vector<pollfd> fds = {{wake_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    for (const Connection& connection : unnamed) fds.push_back({connection->get(), POLLIN, 0});
    for (const auto& [process, connection] : connections) {
      fds.push_back({connection->get(), POLLIN, 0});
    }
    if (poll(fds.data(), fds.size(), -1) < 0) continue;
    uint64_t count = 0;
    if (fds[0].revents != 0) static_cast<void>(!read(wake_.get(), &count, sizeof count));
    if (fds[1].revents != 0) AcceptOne();
    size_t next = 2;
    for (const Connection& connection : unnamed) {
      if (fds[next++].revents != 0) Greet(connection);
    }
    for (const auto& [process, connection] : connections) {
      if (fds[next++].revents != 0) ReceiveFrom(process, connection);
    }
  }
}

void Connections::AcceptOne() {
  UniqueFd connection;
  if (!Accept(listener_.get(), &connection).ok()) return;
  const std::lock_guard lock(mutex_);
  unnamed_.push_back(std::make_shared<UniqueFd>(std::move(connection)));
}

// Reads the first message of a connection, which says who it is.
void Connections::Greet(Connection connection) {
  {
    const std::lock_guard lock(mutex_);
    std::erase(unnamed_, connection);
  }
  Message message;
  Frame frame;
  bool ended = false;
  if (!Receive(connection->get(), &message, &ended).ok() || ended) return;
  if (!Decode(std::move(message), &frame) || frame.header.kind != Frame::Kind::kHello) return;
  Add(frame.header.group, std::move(connection));
}

void Connections::ReceiveFrom(uint64_t process, const Connection& connection) {
  Message message;
  Frame frame;
  bool ended = false;
  const Status status = Receive(connection->get(), &message, &ended);
  if (!status.ok() || ended || !Decode(std::move(message), &frame)) return End(process);
  if (frame.header.kind == Frame::Kind::kLeave) {
    const std::lock_guard lock(mutex_);
    leaving_[process] = true;
  } else {
    Deliver(process, std::move(frame));
  }
}

void Connections::End(uint64_t process) {
  const std::lock_guard delivery(delivery_);
  bool in_order = false;
  {
    const std::lock_guard lock(mutex_);
    connections_.erase(process);
    in_order = leaving_.contains(process);
    ended_[process] = in_order;
    changed_.notify_all();
  }
  for (const auto& [group, receiver] : receivers_) receiver->OnEnd(process, in_order);
}

void Connections::Deliver(uint64_t process, Frame frame) {
  const std::lock_guard delivery(delivery_);
  const uint64_t group = frame.header.group;
  const auto found = receivers_.find(group);
  if (found != receivers_.end()) {
    found->second->OnFrame(process, std::move(frame));
  } else {
    early_[group].emplace_back(process, std::move(frame));
  }
}

}  // namespace jax_ep
