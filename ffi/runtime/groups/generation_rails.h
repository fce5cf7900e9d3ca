// The rails of a generation whose NVLink domains are joined by a network: what partners need of
// each other's memory, and the senders of the local ranks.
#ifndef JAX_EP_RUNTIME_GROUPS_GENERATION_RAILS_H_
#define JAX_EP_RUNTIME_GROUPS_GENERATION_RAILS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ffi/device/protocol/control_block.h"
#include "ffi/device/transfer/hierarchical/domains.h"
#include "ffi/runtime/network/networks.h"
#include "ffi/runtime/network/rail_probe.h"
#include "ffi/runtime/network/rail_sender.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

// Not thread-safe, except Flush and Failure.
class GenerationRails {
 public:
  // `networks` are indexed by rank, null for those of other processes.
  GenerationRails(const Domains& domains,
                  const std::vector<std::shared_ptr<DeviceNetwork>>& networks);
  // Flushes. Partners must have flushed, too.
  ~GenerationRails();
  GenerationRails(const GenerationRails&) = delete;
  GenerationRails& operator=(const GenerationRails&) = delete;

  const Domains& domains() const { return domains_; }

  // Whether kernels put by themselves: then rails have memory of the network's.
  bool kernels_put() const;
  // Allocates such memory for a local rank, which lives as long as the rails.
  Status Allocate(size_t rank, size_t bytes, void** memory, bool* out_of_memory);

  // Registers the memory of a local rank. Its kernels will make requests here.
  Status Register(size_t rank, void* memory, size_t bytes, const RankMemoryAddresses& addresses,
                  const RailRequests* requests);
  // Returns what the rank's partners need for Connect.
  std::string Offer(size_t rank) const;

  // Opens the partners' memory, and serves the local ranks from now on. `offers` are by rank; only
  // those of partners are read.
  Status Connect(const std::vector<std::string>& offers);

  // Returns what a local rank's kernels need to put by themselves. Call it after Connect.
  SymmetricRails Symmetric(size_t rank) const;
  // Finds by which address a local rank reaches the inbox of another one in its domain, which has
  // made the offer.
  Status MapInbox(size_t rank, size_t other, const std::string& offer, Inbox** inbox);

  // Tries all rails of the local ranks, while the partners do; no kernel runs yet. An error says
  // what the network does wrong, such as nothing for `seconds`. `copies` are by rank. Call it after
  // Connect.
  Status Probe(const std::vector<RankMemoryCopies>& copies, const RankNames& names,
               uint64_t generation, double seconds);
  // Makes the flags those of a new generation. All partners must have ended Probe, and no kernel of
  // theirs may run yet.
  Status EndProbe();

  // Waits until all that the kernels have put or asked for has arrived, and serves them no more,
  // also after an error. No kernel of the generation may run.
  Status Flush();

  // The first error of a network, or OK.
  Status Failure() const;

 private:
  struct Rank {
    std::shared_ptr<DeviceNetwork> network;
    void* allocated = nullptr;
    void* memory = nullptr;
    RankMemoryAddresses addresses = {};
    const RailRequests* requests = nullptr;
    std::string offer;                          // the network's
    std::vector<int> memories;                  // belong to the partners, by rail
    std::vector<int> others;                    // belong to ranks of its domain
    std::vector<RankMemoryAddresses> partners;  // likewise
    std::vector<std::string> names;             // name what carries the bytes, likewise
    std::unique_ptr<RailProbe> probe;           // between Probe and EndProbe
    std::shared_ptr<RailSender> sender;         // null before Connect and after Flush
  };

  Status Open(size_t rank, size_t other, const std::string& offer, RankMemoryAddresses* addresses,
              int* memory, std::string* network) const;
  std::shared_ptr<RailSender> MakeSender(size_t rank, const RailRequests* requests) const;
  Status RunProbes(double seconds);

  const Domains domains_;
  std::mutex flushing_;
  std::vector<Rank> ranks_;
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_GROUPS_GENERATION_RAILS_H_
