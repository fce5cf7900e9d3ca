#include "ffi/runtime/groups/mailbox.h"

#include <utility>

namespace jax_ep {

bool Mailbox::Post(TimeoutReport report) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (reports_.size() >= kCapacity) return false;
  reports_.push_back(std::move(report));
  return true;
}

std::vector<TimeoutReport> Mailbox::Take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(reports_, {});
}

Mailbox& ProcessMailbox() {
  static auto* const mailbox = new Mailbox;
  return *mailbox;
}

}  // namespace jax_ep
