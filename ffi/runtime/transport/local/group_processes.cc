#include "ffi/runtime/transport/local/group_processes.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <set>

namespace jax_ep {
namespace {

constexpr char kChoices[] =
    "The CUDA kernels exchange rows within one host. Choose a mesh whose expert axis stays inside "
    "each host, or implementation=\"xla\" (JAX_EP_IMPLEMENTATION=xla), which runs anywhere";

}  // namespace

GroupProcesses::GroupProcesses(const std::vector<Identity>& ranks) {
  for (const Identity& rank : ranks) {
    const size_t index = IndexOf(rank.process);
    if (index == processes_.size()) processes_.push_back(rank);
    process_of_.push_back(index);
  }
  self_ = IndexOf(ThisProcess().process);
}

size_t GroupProcesses::IndexOf(uint64_t process) const {
  const auto found =
      std::find_if(processes_.begin(), processes_.end(),
                   [&](const Identity& identity) { return identity.process == process; });
  return static_cast<size_t>(found - processes_.begin());
}

std::string GroupProcesses::Describe(size_t process) const {
  std::string ranks;
  for (size_t rank = 0; rank < process_of_.size(); ++rank) {
    if (process_of_[rank] == process) ranks += Concatenate(ranks.empty() ? "" : ", ", rank);
  }
  return Concatenate(ranks.find(',') == std::string::npos ? "rank " : "ranks ", ranks, " in ",
                     jax_ep::Describe(processes_[process]));
}

Status GroupProcesses::CheckHosts() const {
  for (size_t other = 0; other < processes_.size(); ++other) {
    if (std::strcmp(processes_[other].boot_id, processes_[self_].boot_id) == 0) continue;
    return FailedPrecondition("jax_ep: a rank group spans hosts: ", DescribeSelf(), ", and ",
                              Describe(other), ", have different boot ids. ", DescribeDomains(),
                              kChoices);
  }
  return {};
}

std::string GroupProcesses::DescribeDomains() const {
  const auto boot_id = [&](size_t rank) {
    return std::string(processes_[process_of_[rank]].boot_id);
  };
  std::set<std::string> hosts;
  size_t domain_size = 0;
  for (size_t first = 0, rank = 0; rank < num_ranks(); first = rank) {
    while (rank < num_ranks() && boot_id(rank) == boot_id(first)) ++rank;
    if (!hosts.insert(boot_id(first)).second) {
      return "Ranks of one host are not next to each other: make the mesh by jax_ep.make_mesh. ";
    }
    domain_size = std::gcd(domain_size, rank - first);
  }
  return Concatenate("Give nvlink_domain_size=", domain_size, ", the ranks that a host has. ");
}

Status GroupProcesses::Connect() const {
  Status first;
  for (size_t other = 0; other < processes_.size(); ++other) {
    if (other == self_) continue;
    Status status = Connections::OfProcess().ConnectWith(processes_[other]);
    if (!status.ok() && first.ok()) {
      first = FailedPrecondition("jax_ep: ", DescribeSelf(), " cannot connect with ",
                                 Describe(other), " of the same host: ", status.message,
                                 ". Either it has died, or it is in another network namespace: "
                                 "containers of one host need "
                                 "one pod, or the host's network. ",
                                 kChoices);
    }
  }
  return first;
}

Status GroupProcesses::Send(const Frame::Header& header, const std::string& bytes,
                            const std::vector<int>& descriptors, const char* subject) const {
  Status first;
  for (size_t other = 0; other < processes_.size(); ++other) {
    if (other == self_) continue;
    Status status =
        Connections::OfProcess().Send(processes_[other].process, header, bytes, descriptors);
    if (!status.ok() && first.ok()) {
      first = FailedPrecondition("jax_ep: ", DescribeSelf(), " cannot tell ", Describe(other),
                                 " of ", subject, ": ", status.message);
    }
  }
  return first;
}

}  // namespace jax_ep
