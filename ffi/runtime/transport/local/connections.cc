#include "ffi/runtime/transport/local/connections.h"

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

#include "ffi/runtime/debug.h"
#include "ffi/runtime/settings.h"
#include "ffi/runtime/transport/local/socket.h"

namespace jax_ep {
namespace {

using Clock = std::chrono::steady_clock;

// A process that has died before it connected listens no more.
constexpr std::chrono::milliseconds kProbePeriod{200};
// Over a network probes become rarer.
constexpr std::chrono::milliseconds kMostProbePeriod{2000};

// Connects with a process that listens.
Status Open(const Identity& other, bool over_network, std::shared_ptr<Connection>* connection) {
  if (over_network) {
    NetworkSettings settings;
    if (Status status = ReadNetworkSettings(&settings); !status.ok()) return status;
    return ConnectStream(other.network_address, {other.secret, sizeof other.secret},
                         std::chrono::nanoseconds(settings.silence_deadline_ns), connection);
  }
  UniqueFd connected;
  Status status = Connect(other.address, &connected);
  if (status.ok()) *connection = std::make_shared<LocalConnection>(std::move(connected));
  return status;
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
                       close(parents.network_.fd());
                       close(parents.wake_.get());
                       for (const Shared& connection : parents.unnamed_) close(connection->fd());
                       for (const auto& [process, connection] : parents.connections_)
                         close(connection->fd());
                       new (&parents) Connections;  // the parent's is abandoned, not destroyed
                     });
  static_cast<void>(registered);
}

Status Connections::ListenOnNetwork(Identity* identity) {
  const std::lock_guard lock(mutex_);
  if (network_.address().empty()) {
    NetworkSettings settings;
    Status status = ReadNetworkSettings(&settings);
    if (status.ok()) status = network_.Open(settings);
    if (!status.ok()) return status;
    Debug("processes of other hosts connect at ", network_.address());
    Wake();
  }
  std::strncpy(identity->network_address, network_.address().c_str(),
               sizeof identity->network_address - 1);
  std::memcpy(identity->secret, network_.secret().data(), sizeof identity->secret);
  return {};
}

Status Connections::ConnectWith(const Identity& other, bool over_network) {
  const std::lock_guard one_at_a_time(connecting_);
  const uint64_t self = ThisProcess().process;
  {
    const std::lock_guard lock(mutex_);
    if (connections_.contains(other.process) || ended_.contains(other.process)) return {};
  }
  if (self > other.process) return AwaitConnection(other, over_network);
  Shared connection;
  Status status = Open(other, over_network, &connection);
  if (status.ok()) {
    status = SendFrame(*connection, {.kind = Frame::Kind::kHello, .group = self}, "");
  }
  if (status.ok()) Add(other.process, std::move(connection));
  return status;
}

// Another process may make its first call with this group much later.
Status Connections::AwaitConnection(const Identity& other, bool over_network) {
  Settings settings;
  if (Status status = ReadSettings(&settings); !status.ok()) return status;
  const auto start = Clock::now();
  auto warning = start + std::chrono::nanoseconds(settings.warning_ns);
  const auto deadline = start + std::chrono::nanoseconds(settings.entry_deadline_ns);
  auto period = kProbePeriod;
  while (Clock::now() < deadline) {
    {
      std::unique_lock lock(mutex_);
      const auto is_known = [&] {
        return connections_.contains(other.process) || ended_.contains(other.process);
      };
      const auto next = std::min({Clock::now() + period, warning, deadline});
      if (changed_.wait_until(lock, next, is_known)) return {};
    }
    if (over_network) period = std::min(2 * period, kMostProbePeriod);
    Shared probe;
    if (Status status = Open(other, over_network, &probe); !status.ok()) return status;
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
  Shared connection;
  {
    const std::lock_guard lock(mutex_);
    const auto found = connections_.find(process);
    if (found == connections_.end()) {
      return ended_.contains(process) ? Status{} : FailedPrecondition("it is not connected");
    }
    connection = found->second;
  }
  return SendFrame(*connection, header, bytes, descriptors);
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
  std::map<uint64_t, Shared> connections;
  {
    const std::lock_guard lock(mutex_);
    connections = connections_;
  }
  for (const auto& [process, connection] : connections) {
    static_cast<void>(SendFrame(*connection, {.kind = Frame::Kind::kLeave}, ""));
  }
}

void Connections::Add(uint64_t process, Shared connection) {
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

}  // namespace jax_ep
