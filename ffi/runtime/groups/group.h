// A group: the devices that exchange rows, with the control blocks and the current generation of
// those that this process drives. Each lane of the same devices is a group of its own, so that
// calls of different lanes share nothing and may run at the same time.
//
// A control block is allocated once for each (device, group) and never freed, because captured
// CUDA graphs keep its address. A generation is allocated before the control blocks change to it,
// in stream order, and the one before is freed last: no call ever uses freed memory.
#ifndef JAX_EP_RUNTIME_GROUPS_GROUP_H_
#define JAX_EP_RUNTIME_GROUPS_GROUP_H_

#include <cuda_runtime_api.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ffi/runtime/groups/generation.h"
#include "ffi/runtime/groups/mailbox.h"
#include "ffi/runtime/status.h"
#include "ffi/runtime/transport/local/peer_group.h"

namespace jax_ep {

// Calls into the kernels, which the runtime does not know.
struct GroupKernels {
  // Loads all kernels on the current device. With lazy loading, the first launch of a kernel
  // synchronizes with the device, where another kernel may be waiting for this very launch.
  Status (*load)();
  Generation::StartKernel start_generation;
};

// Thread-safe. No lock is held over a call of the driver: one thread at a time changes the
// generation, and the others see the one before until it has changed.
class Group {
 public:
  // `devices` are CUDA ordinals in rank order. If some are kRemoteDevice, `peers` are the processes
  // of all ranks, and `memories` are kinds of memory that these can map, the best first. With a
  // `domain_size`, there are several NVLink domains of so many ranks.
  Group(std::vector<int> devices, GroupKernels kernels, int64_t domain_size = 0,
        std::unique_ptr<PeerGroup> peers = nullptr, std::vector<PeerMemory*> memories = {});

  // Makes the workspaces at least this large, for calls that follow in streams[rank]. Call it while
  // no device of the group is launching a program: it makes driver calls on all of them.
  Status Reserve(int64_t workspace_bytes, const std::vector<cudaStream_t>& streams);

  // Starts a generation without workspaces, and frees those of the one before. Returns their bytes.
  // Call it when the devices are idle (Groups::Drain): a call that runs then finds no workspace.
  int64_t Release();

  // Ends all calls that run, and those that follow until the next Release. Callable at any time:
  // kernels that wait find it.
  void Abort(const std::string& reason);

  // Aborts if a call has waited for a peer for longer than the warning time.
  void AbortLongWait(const char* why);
  void ShortenWarnings(double seconds);

  bool HasRoom(int64_t workspace_bytes) const;
  const std::vector<int>& devices() const { return local_devices_; }
  size_t num_ranks() const { return devices_.size(); }
  PeerGroup* peers() const { return peers_.get(); }  // null if all ranks are local
  ControlBlock* control(int rank) const { return members_[rank].control; }

  // The first failure since the last Release, or OK.
  Status Failure() const;
  void PostReports(Mailbox& mailbox);

  // Waits until what its ranks have put over a network has arrived, at exit.
  void Flush();

  // Called now and then: prints warnings, tells the other processes of a failure, and ends calls
  // that wait for a process that has exited.
  void Watch();

  // Whether the next Reserve has something to free.
  bool HasUnused() const;

 private:
  // The thread that changes the generation, until the end of its scope.
  class Change;
  struct Retired {
    std::shared_ptr<Generation> generation;
    std::shared_ptr<Generation> next;  // no kernel uses earlier ones once this one has begun
    bool is_flushed;                   // or no network puts into its memory from another process
  };

  // Retired generations whose calls have ended. One that has failed is kept until a Release, so
  // that the host is told.
  enum Freed { kSound, kAll };

  std::shared_ptr<Generation> current() const;
  std::vector<std::shared_ptr<Generation>> All() const;  // in their order
  void AbortLocal(const std::string& reason);
  void TellPeers(uint64_t era, const std::string& reason);
  void TellFailure(uint64_t era);
  Status AllocateOnce();
  Status AllocateMember(Member* member) const;
  Status Allocate(int64_t workspace_bytes, std::unique_ptr<Generation>* next, bool* out_of_memory);
  bool HasNetwork() const;
  Status JoinNetwork(const Status& own);
  Status MakeRails(std::unique_ptr<GenerationRails>* rails) const;
  Status FlushRetired();
  Status AllocateShared(int64_t workspace_bytes, std::unique_ptr<Generation>* next,
                        bool* out_of_memory);
  Status Grow(int64_t workspace_bytes, const std::vector<cudaStream_t>& streams);
  int64_t ReleaseNow();
  void JoinPeers();
  bool AgreeOnRelease(bool* has_generation);
  void AwaitReason(Generation& generation) const;
  Status Begin(std::unique_ptr<Generation> next, const std::vector<cudaStream_t>& streams);
  void FreeRetired(Freed freed);

  const std::vector<int> devices_;
  std::vector<int> local_devices_;
  const GroupKernels kernels_;
  const int64_t domain_size_;  // 0: one domain has all ranks
  const std::unique_ptr<PeerGroup> peers_;
  std::vector<PeerMemory*> memories_;  // after the first generation, the one that works
  std::vector<Member> members_;        // indexed by rank; complete before any HasRoom

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool is_changing_ = false;
  std::atomic<bool> is_releasing_ = false;
  uint64_t last_number_ = 0;
  bool has_joined_network_ = false;
  std::string abort_reason_;  // empty, or given by the first Abort since the last Release
  std::shared_ptr<Generation> generation_;
  std::vector<Retired> retired_;  // in their order
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_GROUPS_GROUP_H_
