// Launches dispatch, redispatch and combine on one device. Each call launches one kernel and does
// nothing else, so CUDA graphs can capture it. Errors are returned before the launch, or by it.
//
// All calls of one control block must be in one order, the same on every rank of the group, by
// stream order on each device. Within that, any sequence of calls is safe.
#ifndef JAX_EP_KERNELS_TRANSFER_LAUNCH_H_
#define JAX_EP_KERNELS_TRANSFER_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/device/protocol/control_block.h"
#include "ffi/device/transfer/plan.h"
#include "ffi/runtime/buffers.h"
#include "ffi/runtime/status.h"
#include "ffi/runtime/workspace.h"

namespace jax_ep {

// The arguments that all transfers share. All but `control` and `num_sms` are equal on all ranks.
struct TransferCall {
  ControlBlock* control = nullptr;  // this device's, in its group
  uint64_t call_site = 0;           // distinguishes calls; the launch adds operation and sizes
  int64_t num_tokens = 0;           // T, of one rank
  int64_t hidden = 0;               // H
  int64_t top_k = 0;                // K
  int64_t num_experts = 0;          // E, of all ranks
  int64_t num_ranks = 0;            // R
  int64_t num_rows = 0;             // M
  ElementType row_type = kOther;    // kBF16, kF16 or kF32
  int64_t num_sms = 0;              // 0: all. May differ between ranks
  bool allow_low_latency = true;    // false: the general kernels are used
  // Bounds the receive rings of a dispatch (token_chunks.h), for tests; 1 or more.
  int64_t ring_chunks = kMaxChunks;
};

// The addresses are this device's operands and results. A buffer without elements may be null.
//
// With `arrivals`, which all ranks give or none, a concurrent kernel may read results before the
// call ends. The caller zeroes them. arrivals[0] becomes 1 when a dispatch's group sizes and row
// offsets are written. arrivals[1 + i] counts the complete rows of [128 * i, 128 * (i + 1)), with
// their weights, up to the end of all groups, padding included. A reader that acquires the full
// count may read these rows (by TMA after a proxy fence). A call that fails may count fewer rows,
// and overwrites rows that it has counted. The reader must leave at least one SM to the call.
struct DispatchCall {
  TransferCall transfer;
  int64_t row_align = 1;
  bool zero_tail = true;
  bool has_weights = false;
  const void* x = nullptr;              // [T, H]
  const int32_t* topk_ids = nullptr;    // [T, K]
  const float* topk_weights = nullptr;  // [T, K]
  void* rows = nullptr;                 // [M, H]
  float* row_weights = nullptr;         // [M]
  uint32_t* arrivals = nullptr;         // [1 + ceil(M / kArrivalRows)]
  PlanResults plan = {};
};

struct RedispatchCall {
  TransferCall transfer;
  bool zero_tail = true;
  bool has_weights = false;
  const void* x = nullptr;  // [T, H]
  PlanOperands plan = {};
  const float* topk_weights = nullptr;  // [T, K]
  void* rows = nullptr;                 // [M, H]
  float* row_weights = nullptr;         // [M]
  uint32_t* arrivals = nullptr;         // [1 + ceil(M / kArrivalRows)]; arrivals[0] stays 0
};

struct CombineCall {
  TransferCall transfer;
  bool has_weights = false;
  bool has_scalars = false;
  const void* y = nullptr;  // [M, H]
  PlanOperands plan = {};
  const float* row_weights = nullptr;   // [M]
  const float* row_scalars = nullptr;   // [M]
  void* out = nullptr;                  // [T, H]
  float* assignment_scalars = nullptr;  // [T, K]
};

// Measures the bandwidth of bulk copies, for benchmarks: each rank stores its rows to its peers'
// workspaces in turn, `repeats` times, without waits in between.
struct BulkCopyCeilingCall {
  TransferCall transfer;
  int64_t repeats = 1;
  const void* x = nullptr;    // [T, H]
  int32_t* status = nullptr;  // [1]
};

// Returns the workspace shape of a call. The error Unimplemented names a size that the kernels do
// not support. Called before a workspace is allocated, and by the launches.
Status CheckTransfer(const TransferCall& call, WorkspaceShape* shape);

// Loads all kernels on the current device. Otherwise the first launch would load them, and wait for
// the device, where a kernel may be waiting for this launch: a deadlock.
Status LoadTransferKernels();

// Starts a generation, between two calls of the control block: `next` is device memory. Peers that
// still make a call of the old generation then fail, instead of waiting for this rank.
Status LaunchStartGeneration(ControlBlock* control, const GenerationState* next,
                             cudaStream_t stream);

Status LaunchDispatch(const DispatchCall& call, cudaStream_t stream);
Status LaunchRedispatch(const RedispatchCall& call, cudaStream_t stream);
Status LaunchCombine(const CombineCall& call, cudaStream_t stream);
Status LaunchBulkCopyCeiling(const BulkCopyCeilingCall& call, cudaStream_t stream);

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_TRANSFER_LAUNCH_H_
