#include "ffi/kernels/transfer/launcher.h"

#include <algorithm>

#include "ffi/kernels/transfer/params.h"
#include "ffi/runtime/device_cuda.h"

namespace jax_ep {
namespace {

uint64_t Hash(uint64_t hash, std::initializer_list<int64_t> values) {
  for (const int64_t value : values) {
    hash = (hash ^ static_cast<uint64_t>(value)) * 0xff51afd7ed558ccdull;
    hash ^= hash >> 32;
  }
  return hash;
}

uint32_t NanWord(ElementType type) {
  if (type == kBF16) return 0x7fc07fc0u;
  return type == kF16 ? 0x7e007e00u : 0x7fc00000u;
}

}  // namespace

Status CheckTransfer(const TransferCall& call, WorkspaceShape* shape) {
  const int64_t element_bytes = ElementBytes(call.row_type);
  *shape = {.num_tokens = call.num_tokens,
            .hidden = call.hidden,
            .top_k = call.top_k,
            .num_experts = call.num_experts,
            .num_ranks = call.num_ranks,
            .element_bytes = element_bytes};
  if (call.row_type != kBF16 && call.row_type != kF16 && call.row_type != kF32) {
    return Unimplemented("rows are of another type; the kernels take bf16, f16 and f32");
  }
  WorkspaceLayout layout;
  if (Status status = PlanWorkspace(*shape, &layout); !status.ok()) return status;
  if (call.num_rows < 0) return InvalidArgument("num_rows is ", call.num_rows);
  if (call.num_sms < 0) return InvalidArgument("num_sms is ", call.num_sms);
  if (call.hidden * element_bytes % kVectorBytes != 0) {
    return Unimplemented("a row has ", call.hidden * element_bytes,
                         " bytes; the kernels take multiples of ", kVectorBytes);
  }
  if (call.top_k > kMaxTopK) {
    return Unimplemented("top_k is ", call.top_k, "; the kernels take up to ", kMaxTopK);
  }
  const struct {
    const char* name;
    int64_t value;
    int64_t max;
  } limits[] = {
      {"num_rows", call.num_rows, kMaxItems},
      // combine has a little more than twice as many items
      {"num_tokens", call.num_tokens, kMaxItems / 4},
      {"num_experts", call.num_experts, kMaxExperts},
      {"num_ranks * num_tokens * top_k", call.num_ranks * call.num_tokens * call.top_k, kMaxItems},
      {"the number of 16-byte vectors of a row", call.hidden * element_bytes / kVectorBytes,
       kMaxItems},
  };
  for (const auto& limit : limits) {
    if (limit.value > limit.max) {
      return Unimplemented(limit.name, " is ", limit.value, "; the kernels take up to ", limit.max);
    }
  }
  return {};
}

Launcher::Launcher(const TransferCall& call, Operation operation, const PrologueItems& prologue,
                   std::initializer_list<int64_t> flags, cudaStream_t stream)
    : num_sms_(call.num_sms), stream_(stream) {
  WorkspaceShape shape;
  WorkspaceLayout layout;
  status_ = CheckTransfer(call, &shape);
  if (status_.ok()) status_ = PlanWorkspace(shape, &layout);
  int64_t all_sms = 0;
  if (status_.ok()) status_ = CountSms(&all_sms);
  if (!status_.ok()) return;
  num_sms_ = num_sms_ == 0 ? all_sms : std::min(num_sms_, all_sms);
  call_.control = call.control;
  call_.claim_tag = ClaimTag(call.call_site);
  call_.fingerprint = Hash(
      call.call_site, {static_cast<int64_t>(operation), call.num_tokens, call.hidden, call.top_k,
                       call.num_experts, call.num_ranks, call.num_rows, call.row_type});
  call_.fingerprint = Hash(call_.fingerprint, flags);
  call_.operation = operation;
  call_.num_tokens = static_cast<int32_t>(call.num_tokens);
  call_.top_k = static_cast<int32_t>(call.top_k);
  call_.num_experts = static_cast<int32_t>(call.num_experts);
  call_.num_local_experts = static_cast<int32_t>(call.num_experts / call.num_ranks);
  call_.local_experts_divmod = FastDivmod(call_.num_local_experts);
  call_.num_ranks = static_cast<int32_t>(call.num_ranks);
  call_.num_rows = static_cast<int32_t>(call.num_rows);
  call_.row_vectors =
      static_cast<int32_t>(call.hidden * ElementBytes(call.row_type) / kVectorBytes);
  call_.num_partial_sums = std::min(call_.top_k, call_.num_ranks);
  const int64_t assignments = call.num_tokens * call.top_k;
  const int64_t tile = CeilDivide(std::max<int64_t>(assignments, 1), kMaxTiles);
  call_.tile_assignments =
      static_cast<int32_t>(CeilDivide(tile, kTileAssignments) * kTileAssignments);
  const int64_t tiles = std::max<int64_t>(1, CeilDivide(assignments, call_.tile_assignments));
  // The prologue is short. The plan's rows are spread over all blocks, because a row costs a thread
  // the latency of memory.
  const int64_t plan_ranges = std::clamp<int64_t>(CeilDivide(call.num_rows, 32), 1, num_sms_);
  call_.num_tiles = static_cast<int32_t>(tiles);
  call_.num_prologue_items =
      static_cast<int32_t>((prologue.tiles ? tiles : 0) + (prologue.plan ? plan_ranges : 0));
  call_.nan_word = NanWord(call.row_type);
  call_.workspace_bytes = static_cast<uint64_t>(layout.bytes);
  for (int i = 0; i < kNumBuffers; ++i) call_.buffer_offsets[i] = layout.buffers[i].offset;
}

int64_t Launcher::Grid(std::initializer_list<int64_t> blocks, int64_t blocks_per_sm) const {
  return std::clamp<int64_t>(std::max(blocks), 1, MaxBlocks(blocks_per_sm));
}

void Launcher::LaunchKernel(const char* name, const void* kernel, int64_t blocks, int threads,
                            void** arguments, int64_t shared_bytes) {
  if (!status_.ok()) return;
  status_ = FromCuda(cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks)),
                                      dim3(static_cast<unsigned>(threads)), arguments,
                                      static_cast<size_t>(shared_bytes), stream_),
                     name);
}

}  // namespace jax_ep
