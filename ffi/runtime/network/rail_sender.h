// Turns what the kernels of one rank ask for in one generation (device/protocol/rail_requests.h)
// into puts over the network.
#ifndef JAX_EP_RUNTIME_NETWORK_RAIL_SENDER_H_
#define JAX_EP_RUNTIME_NETWORK_RAIL_SENDER_H_

#include <cstdint>
#include <vector>

#include "ffi/device/protocol/control_block.h"
#include "ffi/device/transfer/hierarchical/domains.h"
#include "ffi/runtime/network/network.h"

namespace jax_ep {

// A rank's memory in a generation: addresses in its process.
struct RankMemoryAddresses {
  uint64_t inbox;
  uint64_t rails;  // the buffer with its rings (calls/workspace.h)
};

// A rank and the rails that begin there.
struct RailLayout {
  Domains domains;
  int rank;
  int slots;  // each rail's ring has so many
};

// Used by one thread.
class RailSender {
 public:
  // `memories` are the partners' (Network::Open) and `partners` their addresses, by rail.
  RailSender(const RailRequests* requests, const RailLayout& layout, const RankMemoryAddresses& own,
             const std::vector<int>& memories, const std::vector<RankMemoryAddresses>& partners);

  // Starts the puts that were asked for since. Returns whether there were any.
  Status Poll(Network& network, bool* found);

 private:
  // The partner's memory that is for this rank.
  struct Far {
    int memory;
    uint64_t ring;      // its first slot
    uint64_t messages;  // the flags of its slots
    uint64_t credits;   // likewise
    uint64_t abort;
    uint64_t leave;
  };
  Status TellAll(Network& network, const uint64_t& request, uint64_t Far::* flag, uint64_t* told,
                 bool* found) const;

  const RailRequests* const requests_;
  const int slots_;
  const uint64_t send_rings_;
  std::vector<Far> rails_;
  // The words that were seen last, by slot.
  std::vector<uint64_t> messages_;
  std::vector<uint64_t> credits_;
  uint64_t abort_ = 0;
  uint64_t leave_ = 0;
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_NETWORK_RAIL_SENDER_H_
