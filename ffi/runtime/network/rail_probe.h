// Tries the rails of a rank before its kernels use them: messages of several sizes in both
// directions, over some wraps of the rings, each as a kernel would send and read it.
#ifndef JAX_EP_RUNTIME_NETWORK_RAIL_PROBE_H_
#define JAX_EP_RUNTIME_NETWORK_RAIL_PROBE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ffi/device/protocol/rail_requests.h"
#include "ffi/runtime/network/rail_sender.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

// Copies between the host and a rank's memory, which may be a GPU's.
struct RankMemoryCopies {
  std::function<Status(uint64_t from, void* to, size_t bytes)> read;
  std::function<Status(uint64_t to, const void* from, size_t bytes)> write;
};

// Names a rank, with its process and host.
using RankNames = std::function<std::string(int rank)>;

// Used by one thread. The partners probe at the same time.
class RailProbe {
 public:
  // `generation` is that of the memory, which may have the bytes of an earlier probe.
  RailProbe(const RailLayout& layout, const RankMemoryAddresses& own, RankMemoryCopies copies,
            RankNames names, uint64_t generation);

  // A RailSender serves them while the probe runs.
  const RailRequests* requests() const { return requests_.get(); }

  // Does all that needs no wait. Sets `found` if there was something. An error names a wrong byte.
  Status Step(bool* found);
  // Whether all messages have arrived, here and at the partners.
  bool IsDone() const;
  // Says which message is missing, if it is not done, and sets the `rail` that it takes.
  std::string Missing(size_t* rail) const;
  // The rail whose message had a wrong byte, or the last that had one.
  size_t last_rail() const { return last_rail_; }

  // Makes the flags those of a new generation. No partner may put any more, nor yet.
  Status Clear() const;

 private:
  struct Rail {
    int partner;
    int sent = 0;
    int received = 0;
    int credited = 0;  // counts those that were sent
  };

  Status ReadFlags();
  Status Send(size_t rail);
  Status Receive(size_t rail);
  uint64_t Slot(size_t rail, int message) const;
  std::string From(int sender, int receiver) const;

  const RailLayout layout_;
  const RankMemoryAddresses own_;
  const RankMemoryCopies copies_;
  const RankNames names_;
  const uint64_t generation_;
  const int slots_;  // each ring uses so many
  std::unique_ptr<RailRequests> requests_;
  std::vector<Rail> rails_;
  size_t last_rail_ = 0;
  // The flags that were read last, by slot.
  std::vector<uint64_t> messages_, credits_;
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_NETWORK_RAIL_PROBE_H_
