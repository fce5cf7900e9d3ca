#include "ffi/kernels/transfer/preparation.h"

#include <algorithm>

#include "ffi/kernels/transfer/kernels.h"
#include "ffi/runtime/calls/workspace.h"
#include "ffi/runtime/cuda/device_cuda.h"

namespace jax_ep {
namespace {

uint64_t Hash(uint64_t hash, std::initializer_list<int64_t> values) {
  for (const int64_t value : values) {
    hash = (hash ^ static_cast<uint64_t>(value)) * 0xff51afd7ed558ccdull;
    hash ^= hash >> 32;
  }
  return hash;
}

// Values of four bits have no NaN, but their scales have.
uint32_t NanWord(ElementType type) {
  if (type == kF8E4M3 || type == kF8E5M2) return 0x7f7f7f7fu;
  if (type == kF8E8M0 || type == kF4E2M1) return 0xffffffffu;
  if (type == kBF16) return 0x7fc07fc0u;
  return type == kF16 ? 0x7e007e00u : 0x7fc00000u;
}

// Returns one in a type of scales, repeated.
uint32_t OneWord(ElementType type) {
  if (type == kF8E4M3) return 0x38383838u;
  return type == kF8E8M0 ? 0x7f7f7f7fu : 0x3f800000u;
}

}  // namespace

Status CheckTransfer(const TransferCall& call) {
  const TransferShape& shape = call.shape;
  if (!IsMoved(shape.format)) {
    return Unimplemented(
        "rows are of another format; the kernels take bf16, f16, f32, and f8 and f4 with scales");
  }
  WorkspaceLayout layout;
  if (Status status = PlanWorkspace(shape, &layout); !status.ok()) return status;
  if (shape.num_rows < 0) return InvalidArgument("num_rows is ", shape.num_rows);
  if (call.num_sms < 0) return InvalidArgument("num_sms is ", call.num_sms);
  if (call.num_lanes < 1) return InvalidArgument("num_lanes is ", call.num_lanes);
  if (shape.has_domains() && call.counts_arrivals) {
    return Unimplemented("calls over domains do not count arrivals");
  }
  if (call.row_align < 1 || call.row_align > kMaxItems) {
    return InvalidArgument("row_align is ", call.row_align);
  }
  if (call.repeats < 1 || call.repeats > kMaxItems) {
    return InvalidArgument("repeats is ", call.repeats);
  }
  if (shape.operand_bytes() % kVectorBytes != 0) {
    return Unimplemented("a row has ", shape.operand_bytes(),
                         " bytes; the kernels take multiples of ", kVectorBytes);
  }
  if (shape.top_k > kMaxTopK) {
    return Unimplemented("top_k is ", shape.top_k, "; the kernels take up to ", kMaxTopK);
  }
  const struct {
    const char* name;
    int64_t value;
    int64_t max;
  } limits[] = {
      {"num_rows", shape.num_rows, kMaxItems},
      // combine has a little more than twice as many items
      {"num_tokens", shape.num_tokens, kMaxItems / 4},
      {"num_experts", shape.num_experts, kMaxExperts},
      {"num_ranks * num_tokens * top_k", shape.num_ranks * shape.num_tokens * shape.top_k,
       kMaxItems},
      {"the number of 16-byte vectors of a row", shape.wire_bytes() / kVectorBytes, kMaxItems},
  };
  for (const auto& limit : limits) {
    if (limit.value > limit.max) {
      return Unimplemented(limit.name, " is ", limit.value, "; the kernels take up to ", limit.max);
    }
  }
  return {};
}

Preparation::Preparation(const TransferCall& call, Operation operation,
                         const PrologueItems& prologue, std::initializer_list<int64_t> flags)
    : num_sms_(call.num_sms) {
  const TransferShape& shape = call.shape;
  WorkspaceLayout layout;
  status_ = CheckTransfer(call);
  if (status_.ok()) status_ = PlanWorkspace(shape, &layout);
  int64_t all_sms = 0;
  if (status_.ok()) status_ = CountSms(&all_sms);
  if (!status_.ok()) return;
  num_sms_ = num_sms_ == 0 ? all_sms : std::min(num_sms_, all_sms);
  if (call.num_lanes > 1) {
    // A block of every lane's kernel must be resident on every device: else one device may fill
    // with one lane while another fills with the next, and each waits for the other. The hardware
    // spreads blocks over the SMs, so a lane's share is a number of blocks, too.
    max_blocks_ = std::max<int64_t>(1, all_sms / call.num_lanes);  // LANE_SHARE
    num_sms_ = std::min(num_sms_, max_blocks_);
  }
  call_.claim_tag = ClaimTag(call.call_site);
  call_.fingerprint =
      Hash(call.call_site, {static_cast<int64_t>(operation), shape.num_tokens, shape.hidden,
                            shape.top_k, shape.num_experts, shape.num_ranks, shape.num_rows,
                            shape.format.payload, shape.format.scales, shape.num_scales()});
  call_.fingerprint = Hash(call_.fingerprint, flags);
  call_.operation = operation;
  call_.num_tokens = static_cast<int32_t>(shape.num_tokens);
  call_.top_k = static_cast<int32_t>(shape.top_k);
  call_.num_experts = static_cast<int32_t>(shape.num_experts);
  call_.num_local_experts = static_cast<int32_t>(shape.num_experts / shape.num_ranks);
  call_.local_experts_divmod = FastDivmod(call_.num_local_experts);
  call_.num_ranks = static_cast<int32_t>(shape.num_ranks);
  call_.num_rows = static_cast<int32_t>(shape.num_rows);
  call_.operand_vectors = static_cast<int32_t>(shape.operand_bytes() / kVectorBytes);
  call_.wire_vectors = static_cast<int32_t>(shape.wire_bytes() / kVectorBytes);
  call_.result_vectors = static_cast<int32_t>(shape.result_bytes() / kVectorBytes);
  call_.scale_bytes = static_cast<int32_t>(shape.scale_bytes());
  call_.num_scale_words = static_cast<int32_t>(shape.num_scale_words());
  const int64_t domain_ranks = shape.has_domains() ? shape.domain_size : shape.num_ranks;
  call_.num_partial_sums = std::min(call_.top_k, static_cast<int32_t>(domain_ranks));
  const int64_t assignments = shape.num_tokens * shape.top_k;
  const int64_t tile = CeilDivide(std::max<int64_t>(assignments, 1), kMaxTiles);
  call_.tile_assignments =
      static_cast<int32_t>(CeilDivide(tile, kTileAssignments) * kTileAssignments);
  const int64_t tiles = std::max<int64_t>(1, CeilDivide(assignments, call_.tile_assignments));
  // The prologue is short. The plan's rows are spread over all blocks, because a row costs a thread
  // the latency of memory.
  const int64_t plan_ranges = std::clamp<int64_t>(CeilDivide(shape.num_rows, 32), 1, num_sms_);
  call_.num_tiles = static_cast<int32_t>(tiles);
  call_.num_prologue_items =
      static_cast<int32_t>((prologue.tiles ? tiles : 0) + (prologue.plan ? plan_ranges : 0));
  call_.nan_word = NanWord(shape.format.payload);
  call_.scale_one = static_cast<int32_t>(OneWord(shape.format.scales));
  call_.scale_nan = static_cast<int32_t>(NanWord(shape.format.scales));
  call_.workspace_bytes = static_cast<uint64_t>(layout.bytes);
  for (int i = 0; i < kNumBuffers; ++i) call_.buffer_offsets[i] = layout.buffers[i].offset;
  if (!shape.has_domains()) return;
  status_ =
      PlanHierarchicalLayout(shape, call.rail_slots, call.ring_chunks, call.chunk_tokens, &layout_);
  layout_.rails_offset = layout.rails.offset;
  call_.fingerprint = Hash(call_.fingerprint, {shape.domain_size, layout_.chunk_tokens,
                                               layout_.domain_slots, layout_.rail_slots});
}

unsigned Preparation::Grid(std::initializer_list<int64_t> blocks, int64_t blocks_per_sm) const {
  return static_cast<unsigned>(std::clamp<int64_t>(std::max(blocks), 1, MaxBlocks(blocks_per_sm)));
}

unsigned Preparation::LowLatencyGrid(const RowSegments& segments, int64_t num_rows,
                                     int64_t num_filled_rows) const {
  const int64_t num_items = num_rows * segments.count() + CeilDivide(num_filled_rows, 32);
  return Grid({CeilDivide(num_items, kLowLatencyThreads / 32)}, 1);
}

HierarchicalSegments Preparation::SizesOf(const RowSegments& segments) const {
  if (layout_.domains.count == 0 || segments.count() == 0) return {};
  return {segments,
          layout_.rails_offset + RailBytes(layout_.domains.count),
          FastDivmod(layout_.chunk_tokens),
          FastDivmod(layout_.domains.num_rails()),
          FastDivmod(std::max(1, layout_.domains.size - 1)),
          FastDivmod(call_.num_ranks)};
}

RowSegments PlanSegments(const TransferCall& call) {
  const TransferShape& shape = call.shape;
  if (!call.allow_low_latency || call.counts_arrivals) return {};
  const int64_t vectors = shape.operand_bytes() / kVectorBytes;
  if (!shape.has_domains()) {
    return PlanRowSegments(shape.num_ranks, shape.num_tokens, shape.top_k, vectors,
                           shape.num_scale_words());
  }
  HierarchicalLayout layout;
  const Status status =
      PlanHierarchicalLayout(shape, call.rail_slots, call.ring_chunks, call.chunk_tokens, &layout);
  if (!status.ok()) return {};
  return PlanHierarchicalSegments(layout, shape.num_ranks, shape.num_tokens, shape.top_k, vectors,
                                  shape.num_scale_words());
}

Status FindRowCopySupport(RowCopySupport* support) {
  constexpr int kFixedBytes = 3 * 1024;  // static shared memory of the kernels
  ComputeCapability device;
  int most = 0;
  Status status = FindComputeCapability(&device);
  if (status.ok()) status = FindSharedBytes(&most);
  *support = {device.major >= 9, most - kFixedBytes};
  return status;
}

int64_t PipelineBytes(const CopyPipeline& pipeline) {
  return pipeline.shared_offset + int64_t{pipeline.num_warps} * CopyPipelineBytes(pipeline);
}

Status LaunchKernels(const std::vector<KernelLaunch>& launches, const void* params,
                     cudaStream_t stream) {
  void* arguments[] = {const_cast<void*>(params)};
  for (const KernelLaunch& launch : launches) {
    const cudaLaunchConfig_t config = {dim3(launch.blocks),
                                       dim3(launch.threads),
                                       launch.shared_bytes,
                                       stream,
                                       const_cast<cudaLaunchAttribute*>(launch.attributes.data()),
                                       static_cast<unsigned>(launch.attributes.size())};
    Status status = FromCuda(cudaLaunchKernelExC(&config, KernelToLaunch(launch.kernel), arguments),
                             launch.name);
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace jax_ep
