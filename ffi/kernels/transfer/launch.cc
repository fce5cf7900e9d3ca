#include "ffi/kernels/transfer/launch.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "ffi/kernels/transfer/launcher.h"
#include "ffi/kernels/transfer/params.h"
#include "ffi/runtime/device_cuda.h"

namespace jax_ep {
namespace {

constexpr int64_t kWarps = kCombineThreads / 32;

RowType ToRowType(ElementType type) {
  if (type == kBF16) return RowType::kBFloat16;
  return type == kF16 ? RowType::kFloat16 : RowType::kFloat32;
}

constexpr int32_t kMaxPipelineBytes = 216 * 1024;
constexpr int32_t kMinSharedBytes = 96 * 1024;  // sm_86 has the least shared memory
constexpr int32_t kCombineSharedBytes = kWarps * kSumPipelineBytes;
static_assert(kCombineSharedBytes <= kMinSharedBytes);
constexpr int32_t kLowLatencyCombineSharedBytes =
    kLowLatencyThreads / 32 * kLowLatencySumPipelineBytes +
    kMaxLowLatencyAssignments * int32_t{sizeof(int32_t)};
static_assert(kLowLatencyCombineSharedBytes <= kMinSharedBytes);

// The current device's support for row copies.
struct RowCopySupport {
  bool has_bulk_copies = false;  // since sm_90; rows go through registers before
  int32_t shared_bytes = 0;      // the dynamic shared memory of a dispatch block
};

Status FindRowCopySupport(RowCopySupport* support) {
  constexpr int kFixedBytes = 3 * 1024;  // static shared memory of the kernels
  int major = 0;
  int most = 0;
  Status status = FindComputeCapabilityMajor(&major);
  if (status.ok()) status = FindSharedBytes(&most);
  *support = {major >= 9, most - kFixedBytes};
  return status;
}

constexpr int32_t kDispatchWarps = kDispatchThreads / 32;
constexpr int32_t kMaxSendWarps = (kMaxDispatchThreads - kDispatchThreads) / 32;

// The shared memory of a dispatch has the quotas, followed by the pipelines. Earlier it has the
// counts of a tile in their place.
constexpr int64_t TileCountBytes(int64_t num_experts) {
  return kDispatchWarps * CountPairs(static_cast<int32_t>(num_experts)) * int64_t{sizeof(int2)};
}
constexpr int64_t QuotaBytes(int64_t num_ranks, int64_t num_experts) {
  return CeilDivide(QuotaWords(num_ranks, num_experts), 32) * 128;
}
static_assert(TileCountBytes(kMaxExperts) <= kMinSharedBytes * 3 / 4);
static_assert(QuotaBytes(1, kMaxExperts) <= kMinSharedBytes * 3 / 4);

// Returns the shared memory up to the end of the pipeline.
int64_t PipelineBytes(const CopyPipeline& pipeline) {
  return pipeline.shared_offset + int64_t{pipeline.num_warps} * CopyPipelineBytes(pipeline);
}

// Returns the number of send warps: they have a few MB in flight, which keeps the links busy. With
// more, the flags and counts that all ranks wait for would queue behind the rows.
int64_t CountSenders(const CallParams& call) {
  constexpr double kBytesInFlight = 3.5 * (1 << 20);
  if (call.num_ranks == 1) return 0;
  // The expected number of peers per token, for uniform routing.
  const double peers = (call.num_ranks - 1) * (1 - std::pow(1 - 1.0 / call.num_ranks, call.top_k));
  const double bytes = static_cast<double>(call.row_vectors * kVectorBytes) * peers;
  return static_cast<int64_t>(std::ceil(std::min(kBytesInFlight / bytes, 1e6)));
}

// Makes the parameters that dispatch and redispatch share. Pipelines begin at `shared_offset`. The
// send pipelines also lie behind the counts of a tile, because send warps begin before these are
// free.
template <typename DispatchCall>
TokenParams MakeTokenParams(const Launcher& launcher, const RowCopySupport& support,
                            int64_t shared_offset, const DispatchCall& dispatch) {
  const CallParams& call = launcher.call();
  const int64_t bytes = std::min(support.shared_bytes, kMaxPipelineBytes) - shared_offset;
  const int64_t senders = CountSenders(call);
  const auto send_warps = static_cast<int32_t>(
      std::min<int64_t>(CeilDivide(senders, launcher.num_sms()), kMaxSendWarps));
  CopyPipeline expand = {0, kDispatchWarps, 0, 0, 0};
  CopyPipeline send = {0, send_warps, 0, 0, 0};
  if (support.has_bulk_copies) {
    send = PlanSendPipeline(call.row_vectors, call.num_ranks, send_warps,
                            static_cast<int32_t>(bytes / 4));
    expand =
        PlanCopyPipeline(call.row_vectors, call.top_k, kDispatchWarps,
                         static_cast<int32_t>(bytes) - send.num_warps * CopyPipelineBytes(send));
  }
  expand.shared_offset = static_cast<int32_t>(shared_offset);
  send.shared_offset =
      static_cast<int32_t>(std::max(PipelineBytes(expand), TileCountBytes(call.num_experts)));
  return {.call = call,
          .expand_pipeline = expand,
          .send_pipeline = send,
          .num_senders = static_cast<int32_t>(senders),
          .chunks = PlanTokenChunks(call.num_tokens, call.row_vectors * kVectorBytes,
                                    call.num_ranks, call.top_k, dispatch.transfer.ring_chunks),
          .zero_tail = dispatch.zero_tail,
          .has_weights = dispatch.has_weights,
          .x = dispatch.x,
          .topk_weights = dispatch.has_weights ? dispatch.topk_weights : nullptr,
          .rows = dispatch.rows,
          .row_weights = dispatch.row_weights,
          .arrivals = dispatch.arrivals};
}

// Returns the segments of a low-latency call, otherwise none.
RowSegments PlanSegments(const TransferCall& call) {
  if (!call.allow_low_latency) return {};
  return PlanRowSegments(call.num_ranks, call.num_tokens, call.top_k,
                         call.hidden * ElementBytes(call.row_type) / kVectorBytes);
}

// The low-latency kernels do not count arrivals.
RowSegments PlanSegments(const RedispatchCall& call) {
  return call.arrivals == nullptr ? PlanSegments(call.transfer) : RowSegments();
}

RowSegments PlanSegments(const DispatchCall& call) {
  const TransferCall& sizes = call.transfer;
  const RowSegments segments = PlanSegments(sizes);
  if (segments.count() == 0 || call.arrivals != nullptr) return {};
  const int64_t assignments = sizes.num_tokens * sizes.top_k;
  const bool fits =
      BlockPlanBytes(sizes.num_ranks, assignments, sizes.num_experts) <= kMinSharedBytes;
  return fits ? segments : RowSegments();
}

// Returns as many blocks as have work at once: each warp has a segment in flight, or 32 rows to
// fill.
int64_t LowLatencyBlocks(const Launcher& launcher, const RowSegments& segments, int64_t num_rows,
                         int64_t num_filled_rows) {
  const int64_t num_items = num_rows * segments.count() + CeilDivide(num_filled_rows, 32);
  return launcher.Grid({CeilDivide(num_items, kLowLatencyThreads / 32)}, 1);
}

int DispatchThreads(const TokenParams& tokens) {
  return kDispatchThreads + 32 * tokens.send_pipeline.num_warps;
}

int64_t DispatchBlocks(const Launcher& launcher, const TokenParams& tokens) {
  const CallParams& call = tokens.call;
  return launcher.Grid({call.num_prologue_items, CeilDivide(call.num_tokens, kMaxSendWarps),
                        CeilDivide(call.num_all_tokens(), tokens.expand_pipeline.num_warps),
                        CeilDivide(call.num_rows, 32 * kDispatchWarps)},
                       1);
}

}  // namespace

Status LoadTransferKernels() {
  RowCopySupport support;
  Status status = FindRowCopySupport(&support);
  std::vector<std::pair<const void*, int>> kernels = {
      {DispatchKernelAddress(), support.shared_bytes},
      {RedispatchKernelAddress(), support.shared_bytes},
      {BulkCopyCeilingKernelAddress(), support.shared_bytes},
      {StartGenerationKernelAddress(), 0},
      {LowLatencyDispatchKernelAddress(), kMinSharedBytes},
      {LowLatencyRedispatchKernelAddress(), 0}};
  for (RowType type : {RowType::kBFloat16, RowType::kFloat16, RowType::kFloat32}) {
    kernels.emplace_back(CombineKernelAddress(type), kCombineSharedBytes);
    kernels.emplace_back(LowLatencyCombineKernelAddress(type), kLowLatencyCombineSharedBytes);
  }
  for (const auto& [kernel, shared_bytes] : kernels) {
    if (!status.ok()) return status;
    status = FromCuda(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
        "loading kernels");
    if (!status.ok()) return status;
    cudaFuncAttributes attributes;  // setting an attribute may not load the kernel
    status = FromCuda(cudaFuncGetAttributes(&attributes, kernel), "loading kernels");
  }
  return status;
}

Status LaunchStartGeneration(ControlBlock* control, const GenerationState* next,
                             cudaStream_t stream) {
  StartGenerationParams params = {control, next};
  void* arguments[] = {&params};
  return FromCuda(cudaLaunchKernel(StartGenerationKernelAddress(), dim3(1),
                                   dim3(kStartGenerationThreads), arguments, 0, stream),
                  "starting a generation");
}

Status LaunchDispatch(const DispatchCall& call, cudaStream_t stream) {
  const int64_t align = call.row_align;
  if (align < 1 || align > kMaxItems) return InvalidArgument("row_align is ", align);
  const RowSegments segments = PlanSegments(call);
  Launcher launcher(
      call.transfer, Operation::kDispatch, {.tiles = true},
      {align, call.zero_tail, call.has_weights, segments.count(), call.transfer.ring_chunks},
      stream);
  RowCopySupport support;
  Status status = launcher.status();
  if (status.ok()) status = FindRowCopySupport(&support);
  if (!status.ok()) return status;
  const CallParams& sizes = launcher.call();
  const int64_t quota_bytes = QuotaBytes(sizes.num_ranks, sizes.num_experts);
  const DispatchParams params = {MakeTokenParams(launcher, support, quota_bytes, call),
                                 FastDivmod(static_cast<int32_t>(align)), call.topk_ids, call.plan};
  if (segments.count() > 0) {
    const LowLatencyDispatchParams low_latency = {
        params, segments, PlanAssignmentRanges(sizes.num_ranks, sizes.num_assignments()),
        FastDivmod(sizes.num_ranks), FastDivmod(std::max(1, sizes.num_ranks - 1))};
    launcher.Launch("low-latency dispatch", LowLatencyDispatchKernelAddress(),
                    LowLatencyBlocks(launcher, segments, sizes.num_all_tokens(), sizes.num_rows),
                    kLowLatencyThreads, low_latency,
                    BlockPlanBytes(sizes.num_ranks, sizes.num_assignments(), sizes.num_experts));
    return launcher.status();
  }
  launcher.Launch("dispatch", DispatchKernelAddress(), DispatchBlocks(launcher, params.tokens),
                  DispatchThreads(params.tokens), params,
                  PipelineBytes(params.tokens.send_pipeline));
  return launcher.status();
}

Status LaunchRedispatch(const RedispatchCall& call, cudaStream_t stream) {
  const RowSegments segments = PlanSegments(call);
  Launcher launcher(
      call.transfer, Operation::kRedispatch, {.tiles = call.has_weights, .plan = true},
      {call.zero_tail, call.has_weights, segments.count(), call.transfer.ring_chunks}, stream);
  RowCopySupport support;
  Status status = launcher.status();
  if (status.ok()) status = FindRowCopySupport(&support);
  if (!status.ok()) return status;
  const CallParams& sizes = launcher.call();
  const int32_t num_weight_items = call.has_weights ? sizes.num_tiles : 0;
  const RedispatchParams params = {MakeTokenParams(launcher, support, 0, call), call.plan,
                                   num_weight_items};
  if (segments.count() > 0) {
    const LowLatencyRedispatchParams low_latency = {
        params, segments, FastDivmod(std::max(1, sizes.num_ranks - 1)), FastDivmod(sizes.top_k)};
    // All ranks' tokens, or the average number of rows here.
    const int64_t rows = std::max(sizes.num_all_tokens(), sizes.num_assignments());
    launcher.Launch("low-latency redispatch", LowLatencyRedispatchKernelAddress(),
                    LowLatencyBlocks(launcher, segments, rows, sizes.num_rows), kLowLatencyThreads,
                    low_latency);
    return launcher.status();
  }
  launcher.Launch("redispatch", RedispatchKernelAddress(), DispatchBlocks(launcher, params.tokens),
                  DispatchThreads(params.tokens), params,
                  PipelineBytes(params.tokens.send_pipeline));
  return launcher.status();
}

Status LaunchCombine(const CombineCall& call, cudaStream_t stream) {
  const RowSegments segments = PlanSegments(call.transfer);
  Launcher launcher(call.transfer, Operation::kCombine, {.plan = true},
                    {call.has_weights, call.has_scalars, segments.count()}, stream);
  if (!launcher.status().ok()) return launcher.status();
  const CallParams& sizes = launcher.call();
  const CombineParams params = {
      sizes,
      call.has_weights,
      call.has_scalars,
      CombineSchedule(sizes.num_tokens, sizes.num_ranks, sizes.row_vectors, kMaxChunks,
                      static_cast<int32_t>(kWarps * launcher.MaxBlocks(2))),
      call.plan,
      call.y,
      call.row_weights,
      call.row_scalars,
      call.out,
      call.assignment_scalars};
  const RowType type = ToRowType(call.transfer.row_type);
  if (segments.count() > 0) {
    const LowLatencyCombineParams low_latency = {params, segments, FastDivmod(sizes.num_ranks)};
    launcher.Launch("low-latency combine", LowLatencyCombineKernelAddress(type),
                    LowLatencyBlocks(launcher, segments, sizes.num_all_tokens(), 0),
                    kLowLatencyThreads, low_latency, kLowLatencyCombineSharedBytes);
    return launcher.status();
  }
  const int64_t blocks =
      launcher.Grid({sizes.num_prologue_items, CeilDivide(params.schedule.num_items(), kWarps)}, 2);
  launcher.Launch("combine", CombineKernelAddress(type), blocks, kCombineThreads, params,
                  kCombineSharedBytes);
  return launcher.status();
}

Status LaunchBulkCopyCeiling(const BulkCopyCeilingCall& call, cudaStream_t stream) {
  if (call.repeats < 1 || call.repeats > kMaxItems) {
    return InvalidArgument("repeats is ", call.repeats);
  }
  Launcher launcher(call.transfer, Operation::kBulkCopyCeiling, {}, {call.repeats}, stream);
  RowCopySupport support;
  Status status = launcher.status();
  if (status.ok()) status = FindRowCopySupport(&support);
  if (!status.ok()) return status;
  const CallParams& sizes = launcher.call();
  CopyPipeline pipeline = {0, kDispatchWarps, 0, 0, 0};
  if (support.has_bulk_copies) {
    pipeline = PlanCopyPipeline(sizes.row_vectors, 1, kDispatchWarps,
                                std::min(support.shared_bytes, kMaxPipelineBytes));
  }
  const BulkCopyCeilingParams params = {sizes, pipeline, static_cast<int32_t>(call.repeats), call.x,
                                        call.status};
  launcher.Launch("bulk_copy_ceiling", BulkCopyCeilingKernelAddress(),
                  launcher.Grid({CeilDivide(sizes.num_tokens, params.pipeline.num_warps)}, 1),
                  kDispatchThreads, params, PipelineBytes(params.pipeline));
  return launcher.status();
}

}  // namespace jax_ep
