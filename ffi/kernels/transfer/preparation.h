// Shared by the preparation of all transfers: the parameters of the call, and the size of its grid.
#ifndef JAX_EP_KERNELS_TRANSFER_PREPARATION_H_
#define JAX_EP_KERNELS_TRANSFER_PREPARATION_H_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "ffi/device/protocol/call_params.h"
#include "ffi/kernels/transfer/launch.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

// sm_86 has the least shared memory.
inline constexpr int32_t kMinSharedBytes = 96 * 1024;

// The prologue of a kernel: work items before the exchange.
struct PrologueItems {
  bool tiles = false;  // tiles of assignments
  bool plan = false;   // ranges of the plan's rows
};

class Preparation {
 public:
  // `flags` are further arguments that must be equal on all ranks, besides the sizes.
  Preparation(const TransferCall& call, Operation operation, const PrologueItems& prologue,
              std::initializer_list<int64_t> flags);

  const CallParams& call() const { return call_; }
  const Status& status() const { return status_; }
  int64_t num_sms() const { return num_sms_; }
  // The layout of a call over several NVLink domains.
  const HierarchicalLayout& layout() const { return layout_; }
  // The sizes of such a call, if it is a low-latency one.
  HierarchicalSegments SizesOf(const RowSegments& segments) const;

  // Returns the largest of the wanted numbers of blocks, at most `blocks_per_sm` per SM.
  unsigned Grid(std::initializer_list<int64_t> blocks, int64_t blocks_per_sm) const;
  int64_t MaxBlocks(int64_t blocks_per_sm) const {
    return std::min(blocks_per_sm * num_sms_, max_blocks_);
  }

  // Returns as many blocks of a low-latency kernel as have work at once: each warp has a segment in
  // flight, or 32 rows to fill.
  unsigned LowLatencyGrid(const RowSegments& segments, int64_t num_rows,
                          int64_t num_filled_rows) const;

 private:
  Status status_;
  CallParams call_ = {};
  HierarchicalLayout layout_ = {};
  int64_t num_sms_;
  int64_t max_blocks_ = INT64_MAX;
};

// Returns the segments of a low-latency call, otherwise none. The low-latency kernels do not count
// arrivals.
RowSegments PlanSegments(const TransferCall& call);

// The current device's support for row copies.
struct RowCopySupport {
  bool has_bulk_copies = false;  // since sm_90; rows go through registers before
  int32_t shared_bytes = 0;      // the dynamic shared memory of a dispatch block
};
Status FindRowCopySupport(RowCopySupport* support);

// The most that copy pipelines get.
inline constexpr int32_t kMaxPipelineBytes = 216 * 1024;

// Returns the shared memory up to the end of the pipeline.
int64_t PipelineBytes(const CopyPipeline& pipeline);

// Launches kernels of one argument, in order.
Status LaunchKernels(const std::vector<KernelLaunch>& launches, const void* params,
                     cudaStream_t stream);

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_TRANSFER_PREPARATION_H_
