#include "ffi/runtime/transport/local/group_processes.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <set>
#include <utility>

namespace jax_ep {
namespace {

// A host that answers, or refuses, does so earlier.
constexpr std::chrono::seconds kSilence{2};

constexpr char kChoices[] =
    "The CUDA kernels exchange rows within one host. Choose a mesh whose expert axis stays inside "
    "each host, or implementation=\"xla\" (JAX_EP_IMPLEMENTATION=xla), which runs anywhere";

// " (10.0.0.1:4711)", if there is an address.
std::string At(const Identity& process) {
  return process.network_address[0] == '\0' ? "" : Concatenate(" (", process.network_address, ")");
}

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

bool GroupProcesses::IsLocal(size_t process) const {
  return std::strcmp(processes_[process].boot_id, processes_[self_].boot_id) == 0;
}

Status GroupProcesses::CheckHosts(int64_t domain_size) const {
  const size_t size = domain_size > 0 ? static_cast<size_t>(domain_size) : num_ranks();
  for (size_t rank = 0; rank < num_ranks(); ++rank) {
    const size_t one = process_of_[rank - rank % size], other = process_of_[rank];
    if (std::strcmp(processes_[one].boot_id, processes_[other].boot_id) == 0) continue;
    return FailedPrecondition("jax_ep: ",
                              domain_size > 0
                                  ? Concatenate("an NVLink domain of ", domain_size, " ranks")
                                  : "a rank group",
                              " spans hosts: ", Describe(one), ", and ", Describe(other),
                              ", have different boot ids. ", DescribeDomains(), kChoices);
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
  std::set<std::string> silent;  // hosts, by boot id: each other try would take as long
  for (size_t other = 0; other < processes_.size(); ++other) {
    if (other == self_ || silent.contains(processes_[other].boot_id)) continue;
    const auto start = Connection::Clock::now();
    Status status = IsLocal(other) ? ConnectLocally(other) : ConnectOverNetwork(other);
    if (status.ok()) continue;
    if (Connection::Clock::now() - start > kSilence) silent.insert(processes_[other].boot_id);
    if (first.ok()) first = std::move(status);
  }
  return first;
}

Status GroupProcesses::ConnectLocally(size_t other) const {
  const Status status = Connections::OfProcess().ConnectWith(processes_[other], false);
  if (status.ok()) return status;
  return FailedPrecondition("jax_ep: ", DescribeSelf(), " cannot connect with ", Describe(other),
                            " of the same host: ", status.message,
                            ". Either it has died, or it is in another network namespace: "
                            "containers of one host need one pod, or the host's network. ",
                            kChoices);
}

Status GroupProcesses::ConnectOverNetwork(size_t other) const {
  Identity self;  // as an error of this process explains more
  Status status = Connections::OfProcess().ListenOnNetwork(&self);
  if (status.ok() && processes_[other].network_address[0] == '\0') {
    status = FailedPrecondition("it has no network address; its own error tells why");
  }
  if (status.ok()) status = Connections::OfProcess().ConnectWith(processes_[other], true);
  if (status.ok()) return status;
  return FailedPrecondition(
      "jax_ep: ", DescribeSelf(), At(self), " cannot connect with ", Describe(other),
      At(processes_[other]), " over the network: ", status.message,
      ". Either it has died, or the hosts do not reach each other: choose another interface by "
      "JAX_EP_NETWORK_INTERFACE, and ports that no firewall closes by JAX_EP_NETWORK_PORTS. ",
      kChoices);
}

Status GroupProcesses::Send(const Frame::Header& header, const std::string& bytes,
                            const std::vector<int>& descriptors, const char* subject) const {
  Status first;
  for (size_t other = 0; other < processes_.size(); ++other) {
    if (other == self_) continue;
    Status status =
        Connections::OfProcess().Send(processes_[other].process, header, bytes,
                                      IsLocal(other) ? descriptors : std::vector<int>{});
    if (!status.ok() && first.ok()) {
      first = FailedPrecondition("jax_ep: ", DescribeSelf(), " cannot tell ", Describe(other),
                                 " of ", subject, ": ", status.message);
    }
  }
  return first;
}

}  // namespace jax_ep
