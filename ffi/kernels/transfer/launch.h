// Dispatch, dispatch by plan, and combine: launches of kernels on one device, and nothing else. A
// CUDA graph may record and replay them. Errors come before the first launch of a call, or from it.
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

// What all ranks of a group give alike, but for the address.
struct TransferCall {
  ControlBlock* control = nullptr;  // of this device and group; the only address kept by kernels
  uint64_t call_site = 0;           // differs between calls; operation and sizes are added here
  int64_t num_tokens = 0;           // T, of one rank
  int64_t hidden = 0;               // H
  int64_t top_k = 0;                // K
  int64_t num_experts = 0;          // E, of all ranks
  int64_t num_ranks = 0;            // R
  int64_t num_rows = 0;             // M
  ElementType row_type = kOther;    // kBF16, kF16 or kF32
  int64_t num_sms = 0;              // to run on; 0: all. May differ between ranks
  bool allow_low_latency = true;    // else it takes the way of calls of many tokens
  // Of a dispatch, at most (token_chunks.h), and 1 at least: fewer than there is memory for in
  // tests.
  int64_t ring_chunks = kMaxChunks;
};

// Addresses are of this device's operands and results. A buffer without elements may be null.
//
// If there are `arrivals`, on all ranks or on none, a kernel that runs at the same time may read
// results before the call ends. All are 0 before. Once arrivals[0] is 1, a dispatch's group sizes
// and row offsets are there. arrivals[1 + i] counts those rows of [128 * i, 128 * (i + 1)) that are
// complete, with their weights, up to the end of all groups, padding included: who acquires it at
// their number may read them (by the copy engine after a fence of the proxies). A call that fails
// may count less, and overwrites what it has counted. The reader has to leave room for the call:
// one multiprocessor at least.
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
  uint32_t* arrivals = nullptr;         // [1 + ceil(M / kArrivalRows)], the first stays 0
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

// What the links can do, for benchmarks: each rank stores its rows into the other ranks'
// workspaces, in turn, with nothing to find and nobody to wait for in between; `repeats` times.
struct BulkCopyCeilingCall {
  TransferCall transfer;
  int64_t repeats = 1;
  const void* x = nullptr;    // [T, H]
  int32_t* status = nullptr;  // [1]
};

// The workspace shape of a call, and whether the kernels take it: Unimplemented names the size that
// they do not. To be asked before a workspace is allocated; the launches ask again.
Status CheckTransfer(const TransferCall& call, WorkspaceShape* shape);

// Loads all kernels on the current device. Without it the first launch does, which waits for the
// device while a peer may be spinning: a deadlock.
Status LoadTransferKernels();

Status LaunchDispatch(const DispatchCall& call, cudaStream_t stream);
Status LaunchRedispatch(const RedispatchCall& call, cudaStream_t stream);
Status LaunchCombine(const CombineCall& call, cudaStream_t stream);
Status LaunchBulkCopyCeiling(const BulkCopyCeilingCall& call, cudaStream_t stream);

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_TRANSFER_LAUNCH_H_
