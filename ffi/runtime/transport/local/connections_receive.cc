// The thread that receives from all connections.
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#include "ffi/runtime/transport/local/connections.h"
#include "ffi/runtime/transport/local/socket.h"

namespace jax_ep {
namespace {

using Clock = Connection::Clock;

// More connections without a first message are of strangers.
constexpr size_t kMaxUnnamed = 256;
// If no connection can be accepted, too many files are open.
constexpr std::chrono::milliseconds kAcceptAgain{50};

// When poll has to return at the latest, as its timeout.
int Milliseconds(Clock::time_point until) {
  if (until == Clock::time_point::max()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1'000'000));
}

}  // namespace

void Connections::Run() {
  while (true) {
    std::map<uint64_t, Shared> connections;
    std::vector<Shared> unnamed;
    std::vector<pollfd> fds = {{wake_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    {
      const std::lock_guard lock(mutex_);
      connections = connections_;
      unnamed = unnamed_;
      fds.push_back({network_.fd(), POLLIN, 0});  // -1 is nothing
    }
    auto deadline = Clock::time_point::max();
    const auto add = [&](const Connection& connection) {
      fds.push_back({connection.fd(), POLLIN, 0});
      deadline = std::min(deadline, connection.deadline());
    };
    for (const Shared& connection : unnamed) add(*connection);
    for (const auto& [process, connection] : connections) add(*connection);
    if (poll(fds.data(), fds.size(), Milliseconds(deadline)) < 0) continue;
    uint64_t count = 0;
    if (fds[0].revents != 0) static_cast<void>(!read(wake_.get(), &count, sizeof count));
    if (fds[1].revents != 0) AcceptLocal();
    if (fds[2].revents != 0) AcceptFromNetwork();
    size_t next = 3;
    const auto is_due = [&](const Connection& connection) {
      return fds[next++].revents != 0 || Clock::now() >= connection.deadline();
    };
    for (const Shared& connection : unnamed) {
      if (is_due(*connection)) Greet(connection);
    }
    for (const auto& [process, connection] : connections) {
      if (is_due(*connection)) ReceiveFrom(process, *connection);
    }
  }
}

void Connections::AcceptLocal() {
  UniqueFd accepted;
  if (!Accept(listener_.get(), &accepted).ok()) return std::this_thread::sleep_for(kAcceptAgain);
  const std::lock_guard lock(mutex_);
  unnamed_.push_back(std::make_shared<LocalConnection>(std::move(accepted)));
}

void Connections::AcceptFromNetwork() {
  Shared accepted;
  if (!network_.Accept(&accepted).ok()) return std::this_thread::sleep_for(kAcceptAgain);
  const std::lock_guard lock(mutex_);
  if (unnamed_.size() >= kMaxUnnamed) unnamed_.erase(unnamed_.begin());
  unnamed_.push_back(std::move(accepted));
}

// Reads the first message of a connection, which says who it is. Strangers get no answer.
void Connections::Greet(const Shared& connection) {
  std::vector<Message> messages;
  const Status status = connection->Receive(&messages);
  if (status.ok() && messages.empty()) return;  // more has to come
  {
    const std::lock_guard lock(mutex_);
    if (std::erase(unnamed_, connection) == 0) return;
  }
  Frame frame;
  if (messages.empty() || !Decode(std::move(messages[0]), &frame)) return;
  if (frame.header.kind != Frame::Kind::kHello) return;
  messages.erase(messages.begin());
  Add(frame.header.group, connection);
  Take(frame.header.group, std::move(messages), status);
}

void Connections::ReceiveFrom(uint64_t process, Connection& connection) {
  std::vector<Message> messages;
  const Status status = connection.Receive(&messages);
  Take(process, std::move(messages), status);
}

// Delivers what has come, and then its end if `status` is not OK.
void Connections::Take(uint64_t process, std::vector<Message> messages, const Status& status) {
  for (Message& message : messages) {
    Frame frame;
    if (!Decode(std::move(message), &frame)) {
      return End(process, FailedPrecondition("cannot be understood: it has sent half a message"));
    }
    // A process that leaves comes no more, though its exit may take long. Its connection stays: who
    // closed one would seem to have died.
    if (frame.header.kind == Frame::Kind::kLeave) {
      End(process, {});
    } else {
      Deliver(process, std::move(frame));
    }
  }
  if (!status.ok()) End(process, status);
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
