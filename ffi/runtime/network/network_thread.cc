#include "ffi/runtime/network/network_thread.h"

#include <chrono>
#include <utility>

namespace jax_ep {
namespace {

using Clock = std::chrono::steady_clock;

// Calls follow each other closely: after work the thread polls without a pause for so long.
constexpr auto kSpin = std::chrono::milliseconds(1);
constexpr auto kPause = std::chrono::microseconds(20);

}  // namespace

NetworkThread::NetworkThread(std::unique_ptr<Network> network, std::function<void()> begin)
    : network_(std::move(network)), begin_(std::move(begin)), thread_([this] { Loop(); }) {}

void NetworkThread::Stop() {
  if (stops_.exchange(true)) return;
  {
    const std::lock_guard lock(mutex_);
    changed_.notify_all();
  }
  thread_.join();
  const std::lock_guard lock(mutex_);
  has_stopped_ = true;
  changed_.notify_all();
}

Status NetworkThread::Run(const std::function<Status(Network&)>& task) {
  Status status;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return task_ == nullptr || has_stopped_; });
  if (has_stopped_) return FailedPrecondition("jax_ep: the network has been stopped");
  task_ = &task;
  task_status_ = &status;
  has_task_ = true;
  changed_.notify_all();
  changed_.wait(lock, [&] { return task_status_ != &status || has_stopped_; });
  if (task_status_ != &status) return status;
  task_ = nullptr;
  task_status_ = nullptr;
  return FailedPrecondition("jax_ep: the network has been stopped");
}

void NetworkThread::RunTask() {
  const std::lock_guard lock(mutex_);
  has_task_ = false;
  *std::exchange(task_status_, nullptr) = (*std::exchange(task_, nullptr))(*network_);
  changed_.notify_all();
}

void NetworkThread::AwaitTask() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return has_task_ || stops_; });
}

void NetworkThread::Add(std::shared_ptr<RailSender> sender) {
  static_cast<void>(Run([&](Network&) {
    senders_.push_back(std::move(sender));
    return Status{};
  }));
}

Status NetworkThread::Remove(const std::shared_ptr<RailSender>& sender, double seconds) {
  const auto deadline = Clock::now() + std::chrono::duration<double>(seconds);
  while (true) {
    bool is_done = false;
    Status status = Failure();
    if (status.ok()) {
      status = Run([&](Network& network) {
        bool found = false;
        Status polled = sender->Poll(network, &found);
        is_done = !found && network.IsIdle();
        return polled;
      });
    }
    if (status.ok() && !is_done && Clock::now() > deadline) {
      status = FailedPrecondition("jax_ep: puts over the network have not arrived within ", seconds,
                                  " s");
    }
    if (status.ok() && !is_done) {
      std::this_thread::sleep_for(kPause);
      continue;
    }
    static_cast<void>(Run([&](Network&) {
      std::erase(senders_, sender);
      return Status{};
    }));
    return status;
  }
}

Status NetworkThread::Failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void NetworkThread::Loop() {
  begin_();
  auto last_work = Clock::now();
  bool has_failed = false;
  while (!stops_) {
    if (network_->KernelsPut() && senders_.empty()) AwaitTask();
    if (has_task_) RunTask();
    bool found = false;
    if (!has_failed) {
      if (Status status = Step(&found); !status.ok()) {
        const std::lock_guard lock(mutex_);
        failure_ = std::move(status);
        has_failed = true;
      }
    }
    const auto now = Clock::now();
    if (found || !network_->IsIdle()) last_work = now;
    if (!has_failed && now - last_work < kSpin) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kPause);
    }
  }
}

Status NetworkThread::Step(bool* found) {
  for (const auto& sender : senders_) {
    bool found_here = false;
    Status status = sender->Poll(*network_, &found_here);
    *found |= found_here;
    if (!status.ok()) return status;
  }
  return network_->Progress();
}

}  // namespace jax_ep
