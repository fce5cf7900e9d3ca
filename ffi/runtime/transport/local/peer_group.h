// The agreement of the processes of a rank group on every step, by an all-gather over their
// sockets. So all of them continue or all of them fail. There is no leader: each process sends to
// all others, and decides by the same contributions as they do.
//
// Steps have one order in all processes, within an era. jax_ep.release() begins the next era,
// which is why it works after a failure.
#ifndef JAX_EP_RUNTIME_TRANSPORT_LOCAL_PEER_GROUP_H_
#define JAX_EP_RUNTIME_TRANSPORT_LOCAL_PEER_GROUP_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ffi/runtime/status.h"
#include "ffi/runtime/transport/identity.h"
#include "ffi/runtime/transport/local/connections.h"
#include "ffi/runtime/transport/local/group_processes.h"
#include "ffi/runtime/transport/transport.h"

namespace jax_ep {

// Thread-safe. It lives until the process ends.
class PeerGroup : private Connections::Receiver {
 public:
  enum class Step : uint32_t {
    kCall,        // the first run of a call site
    kGeneration,  // memory for the next generation is allocated
    kMapped,      // the others' memory is mapped
    kUnmapped,    // the memory of the generation before is unmapped
    kRelease,     // jax_ep.release()
    kNetwork,     // the network connects all processes
  };
  struct Contribution {
    std::string bytes;
    std::vector<MemoryHandle> handles;
  };
  // Ends the calls of this process. Called at most once per era, and when a process dies.
  using OnFailure = std::function<void(const std::string& reason, bool has_died)>;

  // `ranks` has the identity of each rank's process. `key` is the same in all processes.
  PeerGroup(uint64_t key, const std::vector<Identity>& ranks);

  // Connects with the other processes. If one is missing, those that are connected fail, too. They
  // may be on several hosts if each NVLink domain of so many ranks is on one (0: there is one).
  Status Connect(int64_t domain_size = 0);
  // Receives from now on.
  void Start(OnFailure on_failure);

  uint64_t key() const { return key_; }
  const GroupProcesses& processes() const { return processes_; }

  // Waits until every process has made this step. Returns their contributions, indexed by process,
  // without handles of this one. An error is the group's: later steps fail, too.
  Status Gather(Step step, const std::string& bytes, const std::vector<MemoryHandle>& handles,
                std::vector<Contribution>* contributions);

  // Makes the step kCall. All processes must run the same call; they get the same new id.
  Status AgreeOnCall(const std::string& call, uint64_t* id);

  uint64_t era() const;

  // Tells the other processes why this one's calls have failed, which end theirs. Does nothing
  // after the end of the era in which that was.
  void ReportFailure(uint64_t era, const std::string& reason);

  // The failure of this era, or OK.
  Status Failure() const;

  // The description of a process that has exited in order, or an empty string.
  std::string Departed() const;

 private:
  using Turn = std::pair<uint64_t, uint64_t>;  // era and turn

  void OnFrame(uint64_t process, Frame frame) override;
  void OnEnd(uint64_t process, const Status& end) override;
  bool HasArrived(const Turn& turn) const;
  Status Await(Step step, const Turn& turn);
  Status CheckSteps(Step step, const Turn& turn) const;
  Status CheckReleases(Step step, const Turn& turn) const;
  Status OtherStep(Step step, size_t process, Step other) const;
  std::string Missing(const Turn& turn) const;
  Status Fail(Status status);
  void BeginEra();

  const uint64_t key_;
  const GroupProcesses processes_;
  OnFailure on_failure_;

  std::mutex gathering_;  // held by the thread that makes a step
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t era_ = 0;
  uint64_t turn_ = 0;
  uint64_t num_calls_ = 0;
  std::map<Turn, std::map<size_t, Frame>> frames_;  // indexed by process
  Status failure_;                                  // since the last release
  bool is_reported_ = false;
  std::map<uint64_t, std::string> later_failures_;  // indexed by era
  Status death_;                                    // a process has died: for ever
  std::map<size_t, std::string> departed_;
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_TRANSPORT_LOCAL_PEER_GROUP_H_
