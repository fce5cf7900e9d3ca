// Prepares and launches dispatch, redispatch and combine on one device. Prepare checks everything
// and plans the launches of a call site. Launch binds the addresses of one execution: it allocates
// no memory and does nothing but launch, so CUDA graphs can capture it.
//
// All calls of one control block must be in one order, the same on every rank of the group, by
// stream order on each device. Within that, any sequence of calls is safe. Calls of different
// control blocks, one of each of `num_lanes` lanes, may run at the same time in any order.
#ifndef JAX_EP_KERNELS_TRANSFER_LAUNCH_H_
#define JAX_EP_KERNELS_TRANSFER_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "ffi/device/protocol/control_block.h"
#include "ffi/device/transfer/plan.h"
#include "ffi/kernels/transfer/params.h"
#include "ffi/runtime/calls/transfer_shape.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

// A transfer of one call site, without its buffers. Only `num_sms` may differ between ranks.
struct TransferCall {
  uint64_t call_site = 0;  // distinguishes calls; the fingerprint adds operation and sizes
  TransferShape shape;
  int64_t num_sms = 0;            // 0: all. May differ between ranks
  int64_t num_lanes = 1;          // each lane gets its share of the SMs
  int64_t row_align = 1;          // dispatch
  bool zero_tail = true;          // dispatch, redispatch
  bool has_weights = false;       // with weights among the operands, and dispatch: the results
  bool has_scalars = false;       // combine
  int64_t repeats = 1;            // bulk_copy_ceiling
  bool allow_low_latency = true;  // false: the general kernels are used
  bool counts_arrivals = false;   // dispatch, redispatch: `arrivals` is given
  // Bounds the receive rings of a dispatch (token_chunks.h), and those inside a domain, for tests;
  // 0: as many as there is room for.
  int64_t ring_chunks = 0;
  // Bounds the rings of a call over several domains, for tests; 0: RailSlots.
  int64_t rail_slots = 0;
  int64_t chunk_tokens = 0;  // likewise, the tokens of a chunk
};

// The addresses are this device's operands and results. A buffer without elements may be null.
//
// With `arrivals`, which all ranks give or none, a concurrent kernel may read results before the
// call ends. They are zero before their first call in the life of the control block, and nobody
// zeroes them later: their values are ArrivalValue of the call's sequence number and a count.
// arrivals[0] has the count 1 when a dispatch's group sizes and row offsets are written.
// arrivals[1 + i] counts the complete rows of [128 * i, 128 * (i + 1)), with their weights, up to
// the end of all groups, padding included. A reader that acquires the full count may read these
// rows (by TMA after a proxy fence). A call that fails may count fewer rows, and overwrites rows
// that it has counted. The reader must leave at least one SM to the call.
//
// S scales of quantized rows are in arrays of their own.
struct DispatchBuffers {
  const void* x = nullptr;              // [T, H]
  const void* scales = nullptr;         // [T, S]
  const int32_t* topk_ids = nullptr;    // [T, K]
  const float* topk_weights = nullptr;  // [T, K]
  void* rows = nullptr;                 // [M, H]
  void* row_scales = nullptr;           // [M, S]
  float* row_weights = nullptr;         // [M]
  uint64_t* arrivals = nullptr;         // [1 + ceil(M / kArrivalRows)]
  PlanResults plan = {};
  ForwardingResults forwarding = {};  // two levels only
};

struct RedispatchBuffers {
  const void* x = nullptr;       // [T, H]
  const void* scales = nullptr;  // [T, S]
  PlanOperands plan = {};
  const float* topk_weights = nullptr;  // [T, K]
  void* rows = nullptr;                 // [M, H]
  void* row_scales = nullptr;           // [M, S]
  float* row_weights = nullptr;         // [M]
  uint64_t* arrivals = nullptr;         // [1 + ceil(M / kArrivalRows)]; arrivals[0] stays
  ForwardingOperands forwarding = {};   // two levels only
};

struct CombineBuffers {
  const void* y = nullptr;  // [M, H]
  PlanOperands plan = {};
  const float* row_weights = nullptr;   // [M]
  const float* row_scalars = nullptr;   // [M]
  void* out = nullptr;                  // [T, H]
  float* assignment_scalars = nullptr;  // [T, K]
  ForwardingOperands forwarding = {};   // two levels only
};

// Measures the bandwidth of bulk copies, for benchmarks: each rank stores its rows to its peers'
// workspaces in turn, `repeats` times, without waits in between.
struct BulkCopyCeilingBuffers {
  const void* x = nullptr;    // [T, H]
  int32_t* status = nullptr;  // [1]
};

struct KernelLaunch {
  const char* name;
  const void* kernel;
  unsigned blocks;
  unsigned threads;
  size_t shared_bytes;
  std::vector<cudaLaunchAttribute> attributes = {};
};

// The launches of a call, in stream order. All of them take `params`, or its first member.
template <typename Params>
struct PreparedCall {
  Params params = {};               // but for the control block and the buffers
  HierarchicalLayout layout = {};   // a call over several domains only
  HierarchicalSegments sizes = {};  // likewise, of low latency
  std::vector<KernelLaunch> launches;
};
using PreparedDispatch = PreparedCall<LowLatencyDispatchParams>;
using PreparedRedispatch = PreparedCall<LowLatencyRedispatchParams>;
using PreparedCombine = PreparedCall<LowLatencyCombineParams>;
using PreparedBulkCopyCeiling = PreparedCall<BulkCopyCeilingParams>;

// Checks a call. The error Unimplemented names a size that the kernels do not support.
Status CheckTransfer(const TransferCall& call);

// Loads all kernels on the current device. Otherwise the first launch would load them, and wait for
// the device, where a kernel may be waiting for this launch: a deadlock.
Status LoadTransferKernels();

// Starts a generation, between two calls of the control block: `next` is device memory. Peers that
// still make a call of the old generation then fail, instead of waiting for this rank.
Status LaunchStartGeneration(ControlBlock* control, const GenerationState* next,
                             cudaStream_t stream);

// Prepares launches on the current device.
Status PrepareDispatch(const TransferCall& call, PreparedDispatch* prepared);
Status PrepareRedispatch(const TransferCall& call, PreparedRedispatch* prepared);
Status PrepareCombine(const TransferCall& call, PreparedCombine* prepared);
Status PrepareBulkCopyCeiling(const TransferCall& call, PreparedBulkCopyCeiling* prepared);

// `control` is this device's, in its group.
Status Launch(const PreparedDispatch& prepared, ControlBlock* control,
              const DispatchBuffers& buffers, cudaStream_t stream);
Status Launch(const PreparedRedispatch& prepared, ControlBlock* control,
              const RedispatchBuffers& buffers, cudaStream_t stream);
Status Launch(const PreparedCombine& prepared, ControlBlock* control, const CombineBuffers& buffers,
              cudaStream_t stream);
Status Launch(const PreparedBulkCopyCeiling& prepared, ControlBlock* control,
              const BulkCopyCeilingBuffers& buffers, cudaStream_t stream);

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_TRANSFER_LAUNCH_H_
