// Which memory of a group's devices their kernels can read where it is.
#ifndef JAX_EP_RUNTIME_PEER_ACCESS_H_
#define JAX_EP_RUNTIME_PEER_ACCESS_H_

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace jax_ep {

class PeerAccess {
 public:
  // CUDA ordinals; peer access is enabled between all of them.
  explicit PeerAccess(std::vector<int> devices) : devices_(std::move(devices)) {}

  // Whether all devices can read an operand of any of them at this address: not what comes from a
  // memory pool that does not share, or from a loaded program. Asks the driver once for every
  // region of memory, as JAX's pool is one.
  bool CanRead(const void* address);

 private:
  bool Ask(uint64_t address) const;

  const std::vector<int> devices_;
  std::mutex mutex_;
  std::map<uint64_t, uint64_t> readable_;  // regions: end by beginning
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_PEER_ACCESS_H_
