#include "ffi/kernels/transfer.h"

#include <algorithm>
#include <initializer_list>

#include "ffi/kernels/stages.h"
#include "ffi/runtime/device_cuda.h"

namespace jax_ep {
namespace {

constexpr int64_t kChunkBytes = 16;
constexpr int64_t kWarps = kThreads / 32;

int64_t CeilDivide(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

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

RowType ToRowType(ElementType type) {
  if (type == kBF16) return RowType::kBFloat16;
  return type == kF16 ? RowType::kFloat16 : RowType::kFloat32;
}

// The kernels of one call, launched in order until one fails.
class Launcher {
 public:
  // `flags` are what ranks must give alike besides the sizes.
  Launcher(const TransferCall& call, Operation operation, std::initializer_list<int64_t> flags,
           cudaStream_t stream)
      : num_sms_(call.num_sms), stream_(stream) {
    WorkspaceShape shape;
    WorkspaceLayout layout;
    status_ = CheckTransfer(call, &shape);
    if (status_.ok()) status_ = PlanWorkspace(shape, &layout);
    if (status_.ok() && num_sms_ == 0) status_ = CountMultiprocessors(&num_sms_);
    if (!status_.ok()) return;
    call_.control = call.control;
    call_.fingerprint = Hash(
        call.call_site, {static_cast<int64_t>(operation), call.num_tokens, call.hidden, call.top_k,
                         call.num_experts, call.num_ranks, call.num_rows, call.row_type});
    call_.fingerprint = Hash(call_.fingerprint, flags);
    call_.operation = operation;
    call_.num_tokens = static_cast<int32_t>(call.num_tokens);
    call_.top_k = static_cast<int32_t>(call.top_k);
    call_.num_experts = static_cast<int32_t>(call.num_experts);
    call_.num_local = static_cast<int32_t>(call.num_experts / call.num_ranks);
    call_.num_ranks = static_cast<int32_t>(call.num_ranks);
    call_.num_rows = static_cast<int32_t>(call.num_rows);
    call_.row_chunks =
        static_cast<int32_t>(call.hidden * ElementBytes(call.row_type) / kChunkBytes);
    call_.num_slots = std::min(call_.top_k, call_.num_ranks);
    call_.nan_word = NanWord(call.row_type);
    call_.workspace_bytes = static_cast<uint64_t>(layout.bytes);
    for (int i = 0; i < kNumBuffers; ++i) call_.offsets[i] = layout.buffers[i].offset;
  }

  const Call& call() const { return call_; }
  const Status& status() const { return status_; }

  // As many blocks as there is work for, up to `blocks_per_sm` on each multiprocessor.
  int64_t Grid(std::initializer_list<int64_t> blocks, int64_t blocks_per_sm = 2) const {
    return std::clamp<int64_t>(std::max(blocks), 1, blocks_per_sm * num_sms_);
  }

  template <typename Stage>
  void Launch(const char* name, const void* kernel, int64_t blocks, int threads,
              const Stage& stage) {
    if (!status_.ok()) return;
    void* arguments[] = {const_cast<Stage*>(&stage)};
    status_ =
        FromCuda(cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks)),
                                  dim3(static_cast<unsigned>(threads)), arguments, 0, stream_),
                 name);
  }

 private:
  Status status_;
  Call call_ = {};
  int64_t num_sms_;
  cudaStream_t stream_;
};

PlanOperands AsOperands(const PlanResults& plan) {
  return {plan.row_offsets, plan.row_source, plan.row_slot, plan.destination, plan.status};
}

// Blocks that copy rows with some chunks a thread.
int64_t CopyBlocks(int64_t rows, const Call& call) {
  return CeilDivide(rows * call.row_chunks, int64_t{4} * kThreads);
}

void LaunchPull(Launcher* launcher, const PullStage& stage) {
  const Call& call = stage.call;
  const int64_t tokens = int64_t{call.num_tokens} * call.num_ranks;
  const int64_t blocks =
      launcher->Grid({CeilDivide(tokens, kWarps), CeilDivide(call.num_rows, 32 * kWarps),
                      stage.zero_tail ? CopyBlocks(call.num_rows, call) : 0});
  launcher->Launch("pull", PullKernelAddress(), blocks, kThreads, stage);
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
  if (call.hidden * element_bytes % kChunkBytes != 0) {
    return Unimplemented("a row has ", call.hidden * element_bytes,
                         " bytes; the kernels take multiples of ", kChunkBytes);
  }
  if (call.top_k > kMaxTopK) {
    return Unimplemented("top_k is ", call.top_k, "; the kernels take up to ", kMaxTopK);
  }
  const struct {
    const char* name;
    int64_t value;
  } items[] = {
      {"num_rows", call.num_rows},
      {"num_experts", call.num_experts},
      {"num_ranks * num_tokens * top_k", call.num_ranks * call.num_tokens * call.top_k},
      {"the number of 16-byte pieces of a row", call.hidden * element_bytes / kChunkBytes},
  };
  for (const auto& item : items) {
    if (item.value > kMaxItems) {
      return Unimplemented(item.name, " is ", item.value, "; the kernels take up to ", kMaxItems);
    }
  }
  return {};
}

Status LoadTransferKernels() {
  const void* const kernels[] = {
      PublishKernelAddress(),
      PlanKernelAddress(),
      PlaceKernelAddress(),
      PullKernelAddress(),
      IndexKernelAddress(),
      ReduceKernelAddress(RowType::kBFloat16),
      ReduceKernelAddress(RowType::kFloat16),
      ReduceKernelAddress(RowType::kFloat32),
      SumKernelAddress(RowType::kBFloat16),
      SumKernelAddress(RowType::kFloat16),
      SumKernelAddress(RowType::kFloat32),
  };
  for (const void* kernel : kernels) {
    cudaFuncAttributes attributes;
    Status status = FromCuda(cudaFuncGetAttributes(&attributes, kernel), "loading kernels");
    if (!status.ok()) return status;
  }
  return {};
}

Status LaunchDispatch(const DispatchCall& call, cudaStream_t stream) {
  const int64_t align = call.row_align;
  if (align < 1 || align > kMaxItems) return InvalidArgument("row_align is ", align);
  Launcher launcher(call.transfer, Operation::kDispatch, {align, call.zero_tail, call.has_weights},
                    stream);
  if (!launcher.status().ok()) return launcher.status();
  const Call& sizes = launcher.call();
  const float* const weights = call.has_weights ? call.topk_weights : nullptr;

  const PublishStage publish = {sizes, call.x, weights, call.topk_ids, {}};
  launcher.Launch("publish", PublishKernelAddress(),
                  launcher.Grid({CopyBlocks(sizes.num_tokens, sizes), sizes.num_experts}), kThreads,
                  publish);

  const PlanStage plan = {sizes, static_cast<int32_t>(align), call.plan};
  launcher.Launch("plan", PlanKernelAddress(), sizes.num_ranks, kThreads, plan);
  const int64_t tiles = CeilDivide(sizes.num_tokens, kPlaceThreads / sizes.top_k);
  const int64_t place_blocks =
      launcher.Grid({tiles * sizes.num_ranks, CeilDivide(sizes.num_rows, kPlaceThreads)}, 8);
  launcher.Launch("place", PlaceKernelAddress(), place_blocks, kPlaceThreads, plan);

  LaunchPull(&launcher, {sizes, call.zero_tail, call.has_weights, AsOperands(call.plan), call.x,
                         weights, call.rows, call.row_weights});
  return launcher.status();
}

Status LaunchDispatchByPlan(const DispatchByPlanCall& call, cudaStream_t stream) {
  Launcher launcher(call.transfer, Operation::kDispatchByPlan, {call.zero_tail, call.has_weights},
                    stream);
  if (!launcher.status().ok()) return launcher.status();
  const Call& sizes = launcher.call();
  const float* const weights = call.has_weights ? call.topk_weights : nullptr;

  const PublishStage publish = {sizes, call.x, weights, nullptr, call.plan};
  const int64_t index_blocks = CeilDivide(sizes.num_rows, kThreads);
  launcher.Launch("publish", PublishKernelAddress(),
                  launcher.Grid({CopyBlocks(sizes.num_tokens, sizes), index_blocks}), kThreads,
                  publish);
  LaunchPull(&launcher, {sizes, call.zero_tail, call.has_weights, call.plan, call.x, weights,
                         call.rows, call.row_weights});
  return launcher.status();
}

Status LaunchCombine(const CombineCall& call, cudaStream_t stream) {
  Launcher launcher(call.transfer, Operation::kCombine, {call.has_weights, call.has_scalars},
                    stream);
  if (!launcher.status().ok()) return launcher.status();
  const Call& sizes = launcher.call();
  const RowType type = ToRowType(call.transfer.row_type);

  const IndexStage index = {sizes, call.plan};
  launcher.Launch("index", IndexKernelAddress(),
                  launcher.Grid({CeilDivide(sizes.num_rows, kThreads)}), kThreads, index);
  const ReduceStage reduce = {sizes,  call.has_weights, call.has_scalars, call.plan,
                              call.y, call.row_weights, call.row_scalars};
  const int64_t tokens = int64_t{sizes.num_tokens} * sizes.num_ranks;
  launcher.Launch("reduce", ReduceKernelAddress(type), launcher.Grid({CeilDivide(tokens, kWarps)}),
                  kThreads, reduce);
  const SumStage sum = {sizes, call.has_scalars, call.plan, call.out, call.choice_scalars};
  launcher.Launch("sum", SumKernelAddress(type),
                  launcher.Grid({CeilDivide(sizes.num_tokens, kWarps)}), kThreads, sum);
  return launcher.status();
}

}  // namespace jax_ep
