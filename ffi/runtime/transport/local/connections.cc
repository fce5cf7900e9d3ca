#include "ffi/runtime/transport/local/connections.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <new>
#include <thread>
#include <utility>

#include "ffi/runtime/settings.h"

namespace jax_ep {
namespace {

using Clock = std::chrono::steady_clock;

// A process that has died before it connected listens no more.
constexpr std::chrono::milliseconds kProbePeriod{200};
// If no connection can be accepted, too many files are open.
constexpr std::chrono::milliseconds kAcceptAgain{50};

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
  if (address_.empty()) {
    const Identity self = ThisProcess();
    const std::string name = Concatenate("jax_ep-", self.pid, "-", std::hex, self.process);
    listener_ = {};
    if (Status status = Listen(name, &listener_); !status.ok()) return status;
    wake_ = UniqueFd(eventfd(0, EFD_CLOEXEC));
    if (!wake_.is_open()) return FailedPrecondition("no eventfd: too many files are open");
    CloseInForks();
    std::thread([this] { Run(); }).detach();
    address_ = name;
  }
  *address = address_;
  return {};
}

void Connections::CloseInForks() {
  static const int registered =
      pthread_atfork([] { OfProcess().mutex_.lock(); }, [] { OfProcess().mutex_.unlock(); },
                     [] {
                       Connections& parents = OfProcess();
                       close(parents.listener_.get());
                       close(parents.wake_.get());
                       for (const Connection& connection : parents.unnamed_)
                         close(connection->get());
                       for (const auto& [process, connection] : parents.connections_)
                         close(connection->get());
                       new (&parents) Connections;  // the parent's is abandoned, not destroyed
                     });
  static_cast<void>(registered);
}

Status Connections::ConnectWith(const Identity& other) {
  const std::lock_guard one_at_a_time(connecting_);
  const uint64_t self = ThisProcess().process;
  {
    const std::lock_guard lock(mutex_);
    if (connections_.contains(other.process) || ended_.contains(other.process)) return {};
  }
  if (self > other.process) return AwaitConnection(other);
  UniqueFd connection;
  Status status = Connect(other.address, &connection);
  if (status.ok()) {
    status = SendFrame(connection.get(), {.kind = Frame::Kind::kHello, .group = self}, "");
  }
  if (status.ok()) Add(other.process, std::make_shared<UniqueFd>(std::move(connection)));
  return status;
}

// Another process may make its first call with this group much later.
Status Connections::AwaitConnection(const Identity& other) {
  Settings settings;
  if (Status status = ReadSettings(&settings); !status.ok()) return status;
  const auto start = Clock::now();
  auto warning = start + std::chrono::nanoseconds(settings.warning_ns);
  const auto deadline = start + std::chrono::nanoseconds(settings.entry_deadline_ns);
  while (Clock::now() < deadline) {
    {
      std::unique_lock lock(mutex_);
      const auto is_known = [&] {
        return connections_.contains(other.process) || ended_.contains(other.process);
      };
      const auto next = std::min({Clock::now() + kProbePeriod, warning, deadline});
      if (changed_.wait_until(lock, next, is_known)) return {};
    }
    UniqueFd probe;
    if (Status status = Connect(other.address, &probe); !status.ok()) return status;
    if (Clock::now() < warning) continue;
    warning = deadline;
    std::fprintf(stderr,
                 "jax_ep: %s has not connected for %g s; process with pid %d waits for it\n",
                 Describe(other).c_str(), static_cast<double>(settings.warning_ns) * 1e-9,
                 static_cast<int>(getpid()));
  }
  return FailedPrecondition("it has not connected within ",
                            static_cast<double>(settings.entry_deadline_ns) * 1e-9,
                            " s (JAX_EP_ENTRY_TIMEOUT_S)");
}

Status Connections::Send(uint64_t process, const Frame::Header& header, const std::string& bytes,
                         const std::vector<int>& descriptors) {
  Connection connection;
  {
    const std::lock_guard lock(mutex_);
    const auto found = connections_.find(process);
    if (found == connections_.end()) {
      return ended_.contains(process) ? Status{} : FailedPrecondition("it is not connected");
    }
    connection = found->second;
  }
  return SendFrame(connection->get(), header, bytes, descriptors);
}

void Connections::Subscribe(uint64_t group, Receiver* receiver) {
  const std::lock_guard delivery(delivery_);
  receivers_[group] = receiver;
  for (auto& [process, frame] : early_[group]) receiver->OnFrame(process, std::move(frame));
  early_.erase(group);
  std::map<uint64_t, Status> ended;
  {
    const std::lock_guard lock(mutex_);
    ended = ended_;
  }
  for (const auto& [process, end] : ended) receiver->OnEnd(process, end);
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
  if (!Accept(listener_.get(), &connection).ok()) return std::this_thread::sleep_for(kAcceptAgain);
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
  Status status = Receive(connection->get(), &message, &ended);
  if (ended) {
    status = FailedPrecondition("has died: it has closed its socket without exiting in order");
  } else if (!status.ok()) {
    status = FailedPrecondition("cannot be heard any more: ", status.message);
  } else if (!Decode(std::move(message), &frame)) {
    status = FailedPrecondition("cannot be understood: it has sent half a message");
  }
  if (!status.ok()) return End(process, status);
  // A process that leaves comes no more, though its exit may take long. Its connection stays: who
  // closed one would seem to have died.
  if (frame.header.kind == Frame::Kind::kLeave) return End(process, {});
  Deliver(process, std::move(frame));
}

// Tells the receivers of an end, once.
void Connections::End(uint64_t process, const Status& end) {
  const std::lock_guard delivery(delivery_);
  {
    const std::lock_guard lock(mutex_);
    if (!end.ok()) connections_.erase(process);
    if (!ended_.try_emplace(process, end).second) return;
    changed_.notify_all();
  }
  for (const auto& [group, receiver] : receivers_) receiver->OnEnd(process, end);
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
