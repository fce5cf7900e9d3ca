// Replaces ffi/device/ptx/cluster.cuh.
#ifndef JAX_EP_DEVICE_PTX_CLUSTER_CUH_
#define JAX_EP_DEVICE_PTX_CLUSTER_CUH_

#include "ffi/device/common/integers.h"
#include "tests/cpp/emulation/ptx/mbarrier.cuh"
#include "tests/cpp/emulation/ptx/shared_memory.cuh"

namespace jax_ep {

inline int ClusterRank() { return static_cast<int>(emulation::Here().rank); }
inline void ClusterArrive() { emulation::ArriveAtCluster(); }
inline void ClusterWait() { emulation::WaitForCluster(); }
inline uint32_t MapToBlock(uint32_t address, int rank) {
  return address | static_cast<uint32_t>(rank + 1) << kEmulatedRankShift;
}
inline void MbarrierArriveRemote(uint32_t barrier) { MbarrierArrive(barrier); }
inline void MbarrierArriveExpectTxRemote(uint32_t barrier, uint32_t bytes) {
  MbarrierArriveExpectTx(barrier, bytes);
}
inline void StoreAsyncRemote(uint32_t to, const int32_t (&words)[4], uint32_t barrier) {
  const uint4 vector = std::bit_cast<uint4>(words);
  uint8_t* const memory = SharedPointer(to);
  EmulatedBarrier* const complete = EmulatedBarrier::At(barrier);
  emulation::RunLater([=] {
    std::memcpy(memory, &vector, sizeof vector);
    complete->Complete(sizeof vector);
  });
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_CLUSTER_CUH_
