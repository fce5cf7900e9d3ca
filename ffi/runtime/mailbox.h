// Reports of waits that ended at their deadline, kept until somebody asks for them.
#ifndef JAX_EP_RUNTIME_MAILBOX_H_
#define JAX_EP_RUNTIME_MAILBOX_H_

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace jax_ep {

struct TimeoutReport {
  int64_t rank = 0;      // that waited
  int64_t peer = 0;      // that it waited for
  std::string phase;     // what it waited for, e.g. "dispatch.entry"
  int64_t sequence = 0;  // the call number

  friend bool operator==(const TimeoutReport&, const TimeoutReport&) = default;
};

// Safe to use from any thread.
class Mailbox {
 public:
  // The first reports tell the cause and the others follow from it, so later ones are let go.
  static constexpr size_t kCapacity = 1024;

  // Returns false if the mailbox is full.
  bool Post(TimeoutReport report);

  // Empties the mailbox. Reports come in the order in which they were posted.
  std::vector<TimeoutReport> Take();

 private:
  std::mutex mutex_;
  std::vector<TimeoutReport> reports_;
};

// The one of this process. It is never destroyed: threads of XLA may outlive static destructors.
Mailbox& ProcessMailbox();

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_MAILBOX_H_
