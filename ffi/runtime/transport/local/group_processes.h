// The processes of a rank group that spans several of them: which ranks each has, and how this one
// reaches the others.
#ifndef JAX_EP_RUNTIME_TRANSPORT_LOCAL_GROUP_PROCESSES_H_
#define JAX_EP_RUNTIME_TRANSPORT_LOCAL_GROUP_PROCESSES_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ffi/runtime/status.h"
#include "ffi/runtime/transport/identity.h"
#include "ffi/runtime/transport/local/connections.h"

namespace jax_ep {

// Immutable. Processes are numbered in the order of their first rank.
class GroupProcesses {
 public:
  // `ranks` has the identity of each rank's process.
  explicit GroupProcesses(const std::vector<Identity>& ranks);

  size_t size() const { return processes_.size(); }
  size_t self() const { return self_; }
  size_t num_ranks() const { return process_of_.size(); }
  size_t process_of(size_t rank) const { return process_of_[rank]; }

  // The index of `Identity::process`, or size().
  size_t IndexOf(uint64_t process) const;

  // "rank 2 in process 1 (pid 4711 on node7)", with all ranks of that process.
  std::string Describe(size_t process) const;
  std::string DescribeSelf() const { return Describe(self_); }

  // Whether the process is on the host of this one.
  bool IsLocal(size_t process) const;

  // Whether hosts are kept apart: each NVLink domain of so many consecutive ranks is on one of them
  // (0: there is one domain). An error says which process is elsewhere.
  Status CheckHosts(int64_t domain_size) const;

  // Connects with the others, also after an error. It says which of them does not answer.
  Status Connect() const;

  // Sends to the others, also after an error. Processes of other hosts get no descriptors. The
  // error says who cannot be told of `subject`.
  Status Send(const Frame::Header& header, const std::string& bytes,
              const std::vector<int>& descriptors, const char* subject) const;

 private:
  Status ConnectLocally(size_t other) const;
  Status ConnectOverNetwork(size_t other) const;

  // "Give nvlink_domain_size=4, ...", or that the order of the ranks splits a host.
  std::string DescribeDomains() const;

  std::vector<Identity> processes_;
  std::vector<size_t> process_of_;  // indexed by rank
  size_t self_ = 0;
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_TRANSPORT_LOCAL_GROUP_PROCESSES_H_
