// A GPU's network by NVSHMEM. Kernels put by themselves; the host puts by a kernel, for probes.
#ifndef JAX_EP_RUNTIME_NETWORK_NVSHMEM_NVSHMEM_NETWORK_H_
#define JAX_EP_RUNTIME_NETWORK_NVSHMEM_NVSHMEM_NETWORK_H_

#include <functional>
#include <map>
#include <string>

#include "ffi/runtime/network/network.h"
#include "ffi/runtime/network/nvshmem/put_params.h"
#include "ffi/runtime/network/nvshmem/world.h"

namespace jax_ep {

// The stream in which the host's puts run.
struct NvshmemStream {
  std::function<Status(const NvshmemPutParams& params)> put;
  std::function<Status(bool* is_idle)> query;
};

class NvshmemNetwork : public Network {
 public:
  // The world has started, and outlives the network.
  NvshmemNetwork(NvshmemWorld* world, NvshmemStream stream)
      : world_(world), stream_(std::move(stream)) {}

  Status Register(void* address, size_t bytes, std::string* key) override;
  Status Unregister(void* /*address*/) override { return {}; }
  Status Address(std::string* address) override;
  Status Connect(const std::string& address, int* connection) override;
  Status Open(int connection, const std::string& key, int* memory) override;
  void Close(int memory) override { opened_.erase(memory); }

  Status Start(const Put& put) override;
  Status Progress() override;
  bool IsIdle() const override { return is_idle_; }

  bool KernelsPut() const override { return true; }
  Status Allocate(size_t bytes, void** address, bool* out_of_memory) override;
  void Free(void* address) override { world_->heap()->Free(reinterpret_cast<uint64_t>(address)); }
  Target TargetOf(int memory, uint64_t address) const override;
  uint64_t Map(int memory, uint64_t address) const override;
  Status Flush(double seconds) override;

  std::string Describe(int connection) const override;

 private:
  // A process's heap.
  struct Heap {
    uint64_t world = 0;
    uint64_t base = 0;
    int32_t pe = 0;
  };

  NvshmemWorld* const world_;
  const NvshmemStream stream_;
  bool is_idle_ = true;
  int next_memory_ = 0;
  std::map<int, Heap> opened_;
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_NETWORK_NVSHMEM_NVSHMEM_NETWORK_H_
