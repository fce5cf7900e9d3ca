// What the launches of the transfers share: what a kernel knows of its call, and the launch.
#ifndef JAX_EP_KERNELS_TRANSFER_LAUNCHER_H_
#define JAX_EP_KERNELS_TRANSFER_LAUNCHER_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>

#include "ffi/device/common/limits.h"
#include "ffi/device/protocol/call.h"
#include "ffi/kernels/transfer/launch.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

// What precedes the exchange of a call, in parts.
struct FirstParts {
  bool of_assignments = false;  // tiles of them
  bool of_plan = false;         // its rows
};

// The kernel of one call, launched if all that it needs is there.
class Launcher {
 public:
  // `flags` are what ranks must give alike besides the sizes.
  Launcher(const TransferCall& call, Operation operation, const FirstParts& parts,
           std::initializer_list<int64_t> flags, cudaStream_t stream);

  const Call& call() const { return call_; }
  const Status& status() const { return status_; }
  int64_t num_sms() const { return num_sms_; }

  // As many blocks as there is work for, up to `blocks_per_sm` on each multiprocessor.
  int64_t Grid(std::initializer_list<int64_t> blocks, int64_t blocks_per_sm) const;
  int64_t MostBlocks(int64_t blocks_per_sm) const { return blocks_per_sm * num_sms_; }

  // `stage` is all that the kernel is given.
  template <typename Stage>
  void Launch(const char* name, const void* kernel, int64_t blocks, int threads, const Stage& stage,
              int64_t shared_bytes = 0) {
    void* arguments[] = {const_cast<Stage*>(&stage)};
    LaunchKernel(name, kernel, blocks, threads, arguments, shared_bytes);
  }

 private:
  void LaunchKernel(const char* name, const void* kernel, int64_t blocks, int threads,
                    void** arguments, int64_t shared_bytes);

  Status status_;
  Call call_ = {};
  int64_t num_sms_;
  cudaStream_t stream_;
};

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_TRANSFER_LAUNCHER_H_
