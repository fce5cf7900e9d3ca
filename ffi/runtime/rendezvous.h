// Where the local devices of one execution meet: the last to arrive does the work, and all get the
// same status. An error on one device alone would make XLA end the process.
#ifndef JAX_EP_RUNTIME_RENDEZVOUS_H_
#define JAX_EP_RUNTIME_RENDEZVOUS_H_

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "ffi/runtime/status.h"

namespace jax_ep {

// Safe to use from any thread. What a device brings is a `Contribution`.
template <typename Contribution>
class Rendezvous {
 public:
  using Work = std::function<Status(const std::vector<Contribution>&)>;

  // Blocks until `num_participants` threads have joined with this `key`, or until the timeout.
  Status Join(int64_t key, size_t num_participants, Contribution contribution, const Work& work,
              std::chrono::milliseconds timeout) {
    std::unique_lock lock(mutex_);
    std::shared_ptr<Session>& entry = sessions_[key];
    if (!entry) entry = std::make_shared<Session>();
    const std::shared_ptr<Session> meeting = entry;
    meeting->contributions.push_back(std::move(contribution));
    if (meeting->contributions.size() == num_participants) {
      sessions_.erase(key);
      meeting->working = true;
      lock.unlock();
      Status status = work(meeting->contributions);
      lock.lock();
      return End(*meeting, std::move(status));
    }
    changed_.wait_for(lock, timeout, [&] { return meeting->over || meeting->working; });
    // Who has come in time waits for the work, however long it takes.
    changed_.wait(lock, [&] { return meeting->over || !meeting->working; });
    if (meeting->over) return meeting->status;
    sessions_.erase(key);  // whoever comes later starts another meeting
    return End(*meeting,
               FailedPrecondition(
                   "only ", meeting->contributions.size(), " of the mesh's ", num_participants,
                   " devices came to this call in this process within ", timeout.count(),
                   " ms. The CUDA kernels run over the devices of one process: if the mesh spans "
                   "several, set JAX_EP_IMPLEMENTATION=xla"));
  }

 private:
  struct Session {
    std::vector<Contribution> contributions;
    bool working = false;
    bool over = false;
    Status status;
  };

  // The others follow.
  Status End(Session& meeting, Status status) {
    meeting.status = std::move(status);
    meeting.over = true;
    changed_.notify_all();
    return meeting.status;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int64_t, std::shared_ptr<Session>> sessions_;
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_RENDEZVOUS_H_
