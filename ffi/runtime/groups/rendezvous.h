// A rendezvous of the local devices of one execution: the last to arrive does the work, and all get
// the same status. An error on one device alone would make XLA end the process.
#ifndef JAX_EP_RUNTIME_GROUPS_RENDEZVOUS_H_
#define JAX_EP_RUNTIME_GROUPS_RENDEZVOUS_H_

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "ffi/runtime/status.h"

namespace jax_ep {

// Thread-safe. Each participant gives a `Contribution`.
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
    const std::shared_ptr<Session> session = entry;
    session->contributions.push_back(std::move(contribution));
    if (session->contributions.size() == num_participants) {
      sessions_.erase(key);
      session->working = true;
      lock.unlock();
      Status status = Run(work, session->contributions);
      lock.lock();
      return End(*session, std::move(status));
    }
    changed_.wait_for(lock, timeout, [&] { return session->over || session->working; });
    // Participants that arrived in time wait for the work, however long it takes.
    changed_.wait(lock, [&] { return session->over || !session->working; });
    if (session->over) return session->status;
    sessions_.erase(key);  // a later participant starts another session
    return End(*session, FailedPrecondition(
                             "only ", session->contributions.size(), " of the ", num_participants,
                             " devices of the mesh in this process reached this call within ",
                             timeout.count(), " ms. Has one of them failed?"));
  }

 private:
  struct Session {
    std::vector<Contribution> contributions;
    bool working = false;
    bool over = false;
    Status status;
  };

  // An exception would leave the others waiting.
  static Status Run(const Work& work, const std::vector<Contribution>& contributions) {
    try {
      return work(contributions);
    } catch (const std::exception& error) {
      return FailedPrecondition("an exception while the devices met: ", error.what());
    } catch (...) {
      return FailedPrecondition("an unknown exception while the devices met");
    }
  }

  // Gives all participants the status.
  Status End(Session& session, Status status) {
    session.status = std::move(status);
    session.over = true;
    changed_.notify_all();
    return session.status;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int64_t, std::shared_ptr<Session>> sessions_;
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_GROUPS_RENDEZVOUS_H_
