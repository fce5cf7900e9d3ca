// A generation of a group: the inboxes and workspaces of all ranks, and what the host reads of
// them. Larger workspaces, and calls after a failure, need a new generation.
#ifndef JAX_EP_RUNTIME_GROUPS_GENERATION_H_
#define JAX_EP_RUNTIME_GROUPS_GENERATION_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "ffi/device/protocol/control_block.h"
#include "ffi/runtime/groups/generation_rails.h"
#include "ffi/runtime/groups/mailbox.h"
#include "ffi/runtime/status.h"
#include "ffi/runtime/transport/transport.h"

namespace jax_ep {

// The device of a rank that another process drives.
inline constexpr int kRemoteDevice = -1;

// A rank's device, and what is the same in all generations. Of a remote rank there is nothing.
struct Member {
  int device = 0;  // CUDA ordinal, or kRemoteDevice
  ControlBlock* control = nullptr;
  // The host's own streams. The first has copies only, which wait for no kernel: they reach a
  // kernel that runs. In the second a release starts its generation.
  cudaStream_t copies = nullptr, starts = nullptr;
};

// Thread-safe, except Allocate and Start.
class Generation {
 public:
  // A rank that waits for a peer, as the rank's device has reported it.
  struct LongWait {
    int rank;
    uint64_t sequence;
    std::string description;
  };
  using StartKernel = Status (*)(ControlBlock* control, const GenerationState* next,
                                 cudaStream_t stream);

  // Allocates everything, and changes nothing that kernels use. If a device has not enough memory,
  // sets `out_of_memory`. With `shared` memory, some ranks are remote: Import comes before Start.
  // With `rails`, a network joins the domains.
  static Status Allocate(const std::vector<Member>& members, uint64_t number,
                         int64_t workspace_bytes, std::unique_ptr<Generation>* generation,
                         bool* out_of_memory, PeerMemory* shared = nullptr,
                         std::unique_ptr<GenerationRails> rails = nullptr);

  // A rank's memory, as other processes reach it.
  struct Shared {
    MemoryHandle handle;  // in the same NVLink domain
    std::string offer;    // over a network, if there is one
  };
  // Shares each local rank's memory, in rank order.
  Status Export(std::vector<Shared>* shared) const;
  // Maps the memory of the remote ranks, or connects with them, and sets the number on which the
  // processes have agreed. `shared` is indexed by rank.
  Status Import(uint64_t number, const std::vector<Shared>& shared);

  // With a network: tries the rails, while the processes of all partners do, before Start. An error
  // says what the network does wrong. `names` names ranks.
  Status ProbeNetwork(const RankNames& names);
  // Follows when all processes have ended ProbeNetwork. None may Start before all have ended this.
  Status EndProbe() { return rails_ ? rails_->EndProbe() : Status{}; }
  bool has_network() const { return rails_ != nullptr; }

  // Frees everything. No kernel of this generation may run.
  ~Generation();
  Generation(const Generation&) = delete;
  Generation& operator=(const Generation&) = delete;

  // Makes each rank's calls that follow in streams[rank] calls of this generation. A rank begins it
  // after `before`, which is null or may still have to wait in other streams. After an error some
  // ranks may have begun it, and it never counts as begun.
  Status Start(StartKernel start, const std::vector<cudaStream_t>& streams,
               const Generation* before);

  // Whether all ranks have begun this generation: then no kernel uses the one before.
  bool HasBegun() const;
  // Waits until they have.
  Status AwaitBegin() const;

  uint64_t number() const { return number_; }
  int64_t workspace_bytes() const { return workspace_bytes_; }  // per rank

  // Ends the calls that run, and all later ones of this generation.
  void Abort(const std::string& reason);

  // The first failure, or OK. A rank that a remote one has ended has no failure of its own.
  Status Failure() const;

  // Asks the devices whether the calls of a local rank have ended.
  bool IsAborted() const;

  // Waits until all that is under way on its network has arrived, and puts nothing any more. All
  // ranks must have begun a later generation.
  Status Flush() { return rails_ ? rails_->Flush() : Status{}; }

  // The first error of its network, or OK.
  Status NetworkFailure() const { return rails_ ? rails_->Failure() : Status{}; }

  // Posts new failures.
  void PostReports(Mailbox& mailbox);

  // Prints which rank has been waiting for which, to stderr like XLA's own warnings.
  void PrintWarnings();

  // A call that has waited for longer than the warning time, and waits still.
  std::optional<LongWait> FindLongWait();

  // Shortens the warning time of all waits, also of those that have begun.
  void ShortenWarnings(double seconds);

 private:
  // Host memory that the device reads and writes.
  struct Records {
    AbortRecord report;
    AbortRecord warning;
    uint32_t abort;       // the source of the host's abort word
    uint64_t warning_ns;  // likewise
    uint64_t claim;       // the control block's, read by the host
    uint64_t generation;  // likewise
    uint32_t abort_read;  // the inbox's abort word, likewise
    RailRequests rail_requests;
  };
  struct RankMemory {
    std::unique_ptr<Records> records;
    bool registered = false;
    GenerationState* state = nullptr;  // one allocation, followed by the inbox and the workspace
    Inbox* inbox = nullptr;            // instead of that one, where kernels put over a network
    SymmetricRails* rails = nullptr;   // in the same case
    PeerMemory::Mapping shared;        // maps that allocation, if ranks are remote
    cudaEvent_t begun = nullptr;
    bool posted = false;
    std::optional<LongWait> long_wait;  // the latest
  };

  Generation(const std::vector<Member>& members, uint64_t number, int64_t workspace_bytes,
             PeerMemory* shared, std::unique_ptr<GenerationRails> rails);

  Status AllocateState(size_t rank, bool* out_of_memory);
  Status AllocateRank(size_t rank, bool* out_of_memory);
  Status RegisterRank(size_t rank, bool* out_of_memory);
  Status RegisterSymmetric(size_t rank, bool* out_of_memory);
  Status ImportInbox(size_t rank, const std::string& offer);
  bool IsMapped(size_t rank) const;
  Status FillStates();
  void PrintWarningsLocked();
  bool WaitsStill(const LongWait& wait) const;
  Inbox* inbox(size_t rank) const;
  unsigned char* workspace(size_t rank) const;

  const std::vector<Member>& members_;  // the group's
  uint64_t number_;
  const int64_t workspace_bytes_;
  PeerMemory* const shared_;                // null if all ranks are local
  std::vector<size_t> local_;               // the local ranks, in order
  bool is_started_ = false;                 // on all ranks
  std::vector<RankMemory> memory_;          // indexed by rank
  std::unique_ptr<GenerationRails> rails_;  // or null

  mutable std::mutex mutex_;  // never held over a call that waits
  double warning_seconds_ = 0;
  Status host_failure_;
  bool host_failure_posted_ = false;
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_GROUPS_GENERATION_H_
