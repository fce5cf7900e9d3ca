// Reports of waits that timed out, kept until they are taken.
#ifndef JAX_EP_RUNTIME_GROUPS_MAILBOX_H_
#define JAX_EP_RUNTIME_GROUPS_MAILBOX_H_

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace jax_ep {

struct TimeoutReport {
  int64_t rank = 0;          // the rank that waited
  int64_t peer = 0;          // the rank that it waited for
  std::string phase = {};    // the operation and the wait, e.g. "dispatch.entry"
  int64_t sequence = 0;      // the call's sequence number, from 1 in each generation
  std::string message = {};  // set by the host; only if the phase is "host"

  friend bool operator==(const TimeoutReport&, const TimeoutReport&) = default;
};

// Thread-safe.
class Mailbox {
 public:
  // The first reports tell the cause, and the others follow from it: later ones are discarded.
  static constexpr size_t kCapacity = 1024;

  // Returns false if the mailbox is full.
  bool Post(TimeoutReport report);

  // Empties the mailbox, and returns the reports in the order in which they were posted.
  std::vector<TimeoutReport> Take();

 private:
  std::mutex mutex_;
  std::vector<TimeoutReport> reports_;
};

// The mailbox of this process. It is never destroyed: threads of XLA may outlive static
// destructors.
Mailbox& ProcessMailbox();

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_GROUPS_MAILBOX_H_
