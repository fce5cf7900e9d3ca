// Shared by all launches of transfers: the parameters of the call, and the launch of its kernel.
#ifndef JAX_EP_KERNELS_TRANSFER_LAUNCHER_H_
#define JAX_EP_KERNELS_TRANSFER_LAUNCHER_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>

#include "ffi/device/common/limits.h"
#include "ffi/device/protocol/call_params.h"
#include "ffi/kernels/transfer/launch.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

// The prologue of a kernel: work items before the exchange.
struct PrologueItems {
  bool tiles = false;  // tiles of assignments
  bool plan = false;   // ranges of the plan's rows
};

// Launches the kernel of one call, unless an error has occurred before.
class Launcher {
 public:
  // `flags` are further arguments that must be equal on all ranks, besides the sizes.
  Launcher(const TransferCall& call, Operation operation, const PrologueItems& prologue,
           std::initializer_list<int64_t> flags, cudaStream_t stream);

  const CallParams& call() const { return call_; }
  const Status& status() const { return status_; }
  int64_t num_sms() const { return num_sms_; }

  // Returns the largest of the wanted numbers of blocks, at most `blocks_per_sm` per SM.
  int64_t Grid(std::initializer_list<int64_t> blocks, int64_t blocks_per_sm) const;
  int64_t MaxBlocks(int64_t blocks_per_sm) const { return blocks_per_sm * num_sms_; }

  // `params` is the kernel's only argument.
  template <typename Params>
  void Launch(const char* name, const void* kernel, int64_t blocks, int threads,
              const Params& params, int64_t shared_bytes = 0) {
    void* arguments[] = {const_cast<Params*>(&params)};
    LaunchKernel(name, kernel, blocks, threads, arguments, shared_bytes);
  }

 private:
  void LaunchKernel(const char* name, const void* kernel, int64_t blocks, int threads,
                    void** arguments, int64_t shared_bytes);

  Status status_;
  CallParams call_ = {};
  int64_t num_sms_;
  cudaStream_t stream_;
};

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_TRANSFER_LAUNCHER_H_
