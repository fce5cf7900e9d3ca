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

constexpr int32_t kMostPipelineBytes = 216 * 1024;
constexpr int32_t kLeastSharedBytes = 96 * 1024;  // of sm_86, the least there is
constexpr int32_t kCombineSharedBytes = kWarps * kSumPipelineBytes;
static_assert(kCombineSharedBytes <= kLeastSharedBytes);
constexpr int32_t kLowLatencyCombineSharedBytes =
    kLowLatencyThreads / 32 * kLowLatencySumPipelineBytes +
    kMaxLowLatencyAssignments * int32_t{sizeof(int32_t)};
static_assert(kLowLatencyCombineSharedBytes <= kLeastSharedBytes);

// What the current device has for rows on their way.
struct RowCopySupport {
  bool copies_rows = false;  // by itself (sm_90); before, rows go through registers
  int32_t shared_bytes = 0;  // that a block of dispatch may ask for
};

Status FindRowCopySupport(RowCopySupport* engine) {
  constexpr int kFixedBytes = 3 * 1024;  // that the kernels have beside it
  int major = 0;
  int most = 0;
  Status status = FindComputeCapabilityMajor(&major);
  if (status.ok()) status = FindSharedBytes(&most);
  *engine = {major >= 9, most - kFixedBytes};
  return status;
}

constexpr int32_t kDispatchWarps = kDispatchThreads / 32;
constexpr int32_t kMostSendingWarps = (kMostDispatchThreads - kDispatchThreads) / 32;

// What a dispatch has in shared memory: quotas, and the ring after them; or before, where both will
// be, the counts of a tile.
constexpr int64_t TileCountBytes(int64_t num_experts) {
  return kDispatchWarps * CountPairs(static_cast<int32_t>(num_experts)) * int64_t{sizeof(int2)};
}
constexpr int64_t QuotaBytes(int64_t num_ranks, int64_t num_experts) {
  return CeilDivide(QuotaWords(num_ranks, num_experts), 32) * 128;
}
static_assert(TileCountBytes(kMaxExperts) <= kLeastSharedBytes * 3 / 4);
static_assert(QuotaBytes(1, kMaxExperts) <= kLeastSharedBytes * 3 / 4);

// With what is before it.
int64_t PipelineBytes(const CopyPipeline& ring) {
  return ring.first_byte + int64_t{ring.num_warps} * CopyPipelineBytes(ring);
}

// So many warps send that a few MB are on their way, which keeps the links busy. More would make
// what everybody waits for queue behind them.
int64_t CountSenders(const Call& call) {
  constexpr double kBytesOnWay = 3.5 * (1 << 20);
  if (call.num_ranks == 1) return 0;
  // The other ranks that a token visits, if routing is uniform.
  const double peers = (call.num_ranks - 1) * (1 - std::pow(1 - 1.0 / call.num_ranks, call.top_k));
  const double bytes = static_cast<double>(call.row_vectors * kVectorBytes) * peers;
  return static_cast<int64_t>(std::ceil(std::min(kBytesOnWay / bytes, 1e6)));
}

// The parts of both dispatches that are alike. Their rings follow what is in shared memory before
// them; and those of senders, who begin sooner, the counts of a tile, too.
template <typename DispatchCall>
TokenParams Tokens(const Launcher& launcher, const RowCopySupport& engine, int64_t first_byte,
                   const DispatchCall& dispatch) {
  const Call& call = launcher.call();
  const int64_t bytes = std::min(engine.shared_bytes, kMostPipelineBytes) - first_byte;
  const int64_t senders = CountSenders(call);
  const auto sending_warps = static_cast<int32_t>(
      std::min<int64_t>(CeilDivide(senders, launcher.num_sms()), kMostSendingWarps));
  CopyPipeline expansions = {0, kDispatchWarps, 0, 0, 0};
  CopyPipeline sends = {0, sending_warps, 0, 0, 0};
  if (engine.copies_rows) {
    sends = PlanSendPipeline(call.row_vectors, call.num_ranks, sending_warps,
                             static_cast<int32_t>(bytes / 4));
    expansions =
        PlanCopyPipeline(call.row_vectors, call.top_k, kDispatchWarps,
                         static_cast<int32_t>(bytes) - sends.num_warps * CopyPipelineBytes(sends));
  }
  expansions.first_byte = static_cast<int32_t>(first_byte);
  sends.first_byte =
      static_cast<int32_t>(std::max(PipelineBytes(expansions), TileCountBytes(call.num_experts)));
  return {.call = call,
          .expansions = expansions,
          .sends = sends,
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

// Of a call that is small, else none.
RowSegments SegmentsOf(const TransferCall& call) {
  if (!call.allow_low_latency) return {};
  return PlanRowSegments(call.num_ranks, call.num_tokens, call.top_k,
                         call.hidden * ElementBytes(call.row_type) / kVectorBytes);
}

// The kernels for few tokens count no arrivals.
RowSegments SegmentsOf(const RedispatchCall& call) {
  return call.arrivals == nullptr ? SegmentsOf(call.transfer) : RowSegments();
}

RowSegments SegmentsOf(const DispatchCall& call) {
  const TransferCall& sizes = call.transfer;
  const RowSegments pieces = SegmentsOf(sizes);
  if (pieces.count() == 0 || call.arrivals != nullptr) return {};
  const int64_t choices = sizes.num_tokens * sizes.top_k;
  const bool fits =
      BlockPlanBytes(sizes.num_ranks, choices, sizes.num_experts) <= kLeastSharedBytes;
  return fits ? pieces : RowSegments();
}

// As many as there is work for at once: for each warp a piece of a row on its way, or 32 rows to be
// filled.
int64_t LowLatencyBlocks(const Launcher& launcher, const RowSegments& pieces, int64_t num_on_way,
                         int64_t num_filled) {
  const int64_t num_parts = num_on_way * pieces.count() + CeilDivide(num_filled, 32);
  return launcher.Grid({CeilDivide(num_parts, kLowLatencyThreads / 32)}, 1);
}

int DispatchThreads(const TokenParams& tokens) {
  return kDispatchThreads + 32 * tokens.sends.num_warps;
}

int64_t DispatchBlocks(const Launcher& launcher, const TokenParams& tokens) {
  const Call& call = tokens.call;
  return launcher.Grid({call.num_parts, CeilDivide(call.num_tokens, kMostSendingWarps),
                        CeilDivide(call.num_all_tokens(), tokens.expansions.num_warps),
                        CeilDivide(call.num_rows, 32 * kDispatchWarps)},
                       1);
}

}  // namespace

Status LoadTransferKernels() {
  RowCopySupport engine;
  Status status = FindRowCopySupport(&engine);
  std::vector<std::pair<const void*, int>> kernels = {
      {DispatchKernelAddress(), engine.shared_bytes},
      {RedispatchKernelAddress(), engine.shared_bytes},
      {BulkCopyCeilingKernelAddress(), engine.shared_bytes},
      {LowLatencyDispatchKernelAddress(), kLeastSharedBytes},
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
    cudaFuncAttributes attributes;  // setting one may load nothing
    status = FromCuda(cudaFuncGetAttributes(&attributes, kernel), "loading kernels");
  }
  return status;
}

Status LaunchDispatch(const DispatchCall& call, cudaStream_t stream) {
  const int64_t align = call.row_align;
  if (align < 1 || align > kMaxItems) return InvalidArgument("row_align is ", align);
  const RowSegments pieces = SegmentsOf(call);
  Launcher launcher(
      call.transfer, Operation::kDispatch, {.of_assignments = true},
      {align, call.zero_tail, call.has_weights, pieces.count(), call.transfer.ring_chunks}, stream);
  RowCopySupport engine;
  Status status = launcher.status();
  if (status.ok()) status = FindRowCopySupport(&engine);
  if (!status.ok()) return status;
  const Call& sizes = launcher.call();
  const int64_t quota_bytes = QuotaBytes(sizes.num_ranks, sizes.num_experts);
  const DispatchParams stage = {Tokens(launcher, engine, quota_bytes, call),
                                FastDivmod(static_cast<int32_t>(align)), call.topk_ids, call.plan};
  if (pieces.count() > 0) {
    const LowLatencyDispatchParams small = {
        stage, pieces, PlanAssignmentRanges(sizes.num_ranks, sizes.num_assignments()),
        FastDivmod(sizes.num_ranks), FastDivmod(std::max(1, sizes.num_ranks - 1))};
    launcher.Launch("low-latency dispatch", LowLatencyDispatchKernelAddress(),
                    LowLatencyBlocks(launcher, pieces, sizes.num_all_tokens(), sizes.num_rows),
                    kLowLatencyThreads, small,
                    BlockPlanBytes(sizes.num_ranks, sizes.num_assignments(), sizes.num_experts));
    return launcher.status();
  }
  launcher.Launch("dispatch", DispatchKernelAddress(), DispatchBlocks(launcher, stage.tokens),
                  DispatchThreads(stage.tokens), stage, PipelineBytes(stage.tokens.sends));
  return launcher.status();
}

Status LaunchRedispatch(const RedispatchCall& call, cudaStream_t stream) {
  const RowSegments pieces = SegmentsOf(call);
  Launcher launcher(
      call.transfer, Operation::kRedispatch, {.of_assignments = call.has_weights, .of_plan = true},
      {call.zero_tail, call.has_weights, pieces.count(), call.transfer.ring_chunks}, stream);
  RowCopySupport engine;
  Status status = launcher.status();
  if (status.ok()) status = FindRowCopySupport(&engine);
  if (!status.ok()) return status;
  const Call& sizes = launcher.call();
  const int32_t num_weight_parts = call.has_weights ? sizes.num_tiles : 0;
  const RedispatchParams stage = {Tokens(launcher, engine, 0, call), call.plan, num_weight_parts};
  if (pieces.count() > 0) {
    const LowLatencyRedispatchParams small = {
        stage, pieces, FastDivmod(std::max(1, sizes.num_ranks - 1)), FastDivmod(sizes.top_k)};
    // As many as there are of all ranks' tokens, or here on average.
    const int64_t rows = std::max(sizes.num_all_tokens(), sizes.num_assignments());
    launcher.Launch("low-latency redispatch", LowLatencyRedispatchKernelAddress(),
                    LowLatencyBlocks(launcher, pieces, rows, sizes.num_rows), kLowLatencyThreads,
                    small);
    return launcher.status();
  }
  launcher.Launch("redispatch", RedispatchKernelAddress(), DispatchBlocks(launcher, stage.tokens),
                  DispatchThreads(stage.tokens), stage, PipelineBytes(stage.tokens.sends));
  return launcher.status();
}

Status LaunchCombine(const CombineCall& call, cudaStream_t stream) {
  const RowSegments pieces = SegmentsOf(call.transfer);
  Launcher launcher(call.transfer, Operation::kCombine, {.of_plan = true},
                    {call.has_weights, call.has_scalars, pieces.count()}, stream);
  if (!launcher.status().ok()) return launcher.status();
  const Call& sizes = launcher.call();
  const CombineParams stage = {
      sizes,
      call.has_weights,
      call.has_scalars,
      CombineSchedule(sizes.num_tokens, sizes.num_ranks, sizes.row_vectors, kMaxChunks,
                      static_cast<int32_t>(kWarps * launcher.MostBlocks(2))),
      call.plan,
      call.y,
      call.row_weights,
      call.row_scalars,
      call.out,
      call.assignment_scalars};
  const RowType type = ToRowType(call.transfer.row_type);
  if (pieces.count() > 0) {
    const LowLatencyCombineParams small = {stage, pieces, FastDivmod(sizes.num_ranks)};
    launcher.Launch("low-latency combine", LowLatencyCombineKernelAddress(type),
                    LowLatencyBlocks(launcher, pieces, sizes.num_all_tokens(), 0),
                    kLowLatencyThreads, small, kLowLatencyCombineSharedBytes);
    return launcher.status();
  }
  const int64_t blocks =
      launcher.Grid({sizes.num_parts, CeilDivide(stage.tickets.Count(), kWarps)}, 2);
  launcher.Launch("combine", CombineKernelAddress(type), blocks, kCombineThreads, stage,
                  kCombineSharedBytes);
  return launcher.status();
}

Status LaunchBulkCopyCeiling(const BulkCopyCeilingCall& call, cudaStream_t stream) {
  if (call.repeats < 1 || call.repeats > kMaxItems) {
    return InvalidArgument("repeats is ", call.repeats);
  }
  Launcher launcher(call.transfer, Operation::kBulkCopyCeiling, {}, {call.repeats}, stream);
  RowCopySupport engine;
  Status status = launcher.status();
  if (status.ok()) status = FindRowCopySupport(&engine);
  if (!status.ok()) return status;
  const Call& sizes = launcher.call();
  CopyPipeline ring = {0, kDispatchWarps, 0, 0, 0};
  if (engine.copies_rows) {
    ring = PlanCopyPipeline(sizes.row_vectors, 1, kDispatchWarps,
                            std::min(engine.shared_bytes, kMostPipelineBytes));
  }
  const BulkCopyCeilingParams stage = {sizes, ring, static_cast<int32_t>(call.repeats), call.x,
                                       call.status};
  launcher.Launch("bulk_copy_ceiling", BulkCopyCeilingKernelAddress(),
                  launcher.Grid({CeilDivide(sizes.num_tokens, stage.ring.num_warps)}, 1),
                  kDispatchThreads, stage, PipelineBytes(stage.ring));
  return launcher.status();
}

}  // namespace jax_ep
