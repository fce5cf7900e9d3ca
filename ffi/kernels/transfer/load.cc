#include <atomic>
#include <utility>
#include <vector>

#include "ffi/kernels/load_kernel.h"
#include "ffi/kernels/transfer/kernels.h"
#include "ffi/kernels/transfer/launch.h"
#include "ffi/kernels/transfer/preparation.h"
#include "ffi/runtime/cuda/device_cuda.h"

namespace jax_ep {

namespace {

std::vector<TransferKernel> Kernels(int shared_bytes) {
  return {{DispatchKernelAddress(), shared_bytes},
          {RedispatchKernelAddress(), shared_bytes},
          {BulkCopyCeilingKernelAddress(), shared_bytes},
          {LowLatencyDispatchKernelAddress(), kMinSharedBytes},
          {LowLatencyRedispatchKernelAddress(), 0}};
}

std::vector<TransferKernel> NetworkKernels(int shared_bytes) {
  return {{StartGenerationKernelAddress(), 0},
          {HierarchicalDispatchKernelAddress(), shared_bytes},
          {HierarchicalRedispatchKernelAddress(), shared_bytes},
          {HierarchicalLowLatencyDispatchKernelAddress(), kMinSharedBytes},
          {HierarchicalLowLatencyRedispatchKernelAddress(), 0}};
}

std::atomic<const KernelReplacements*> replacements = nullptr;

}  // namespace

Status ListTransferKernels(bool only_of_networks, std::vector<TransferKernel>* kernels) {
  RowCopySupport support;
  Status status = FindRowCopySupport(&support);
  *kernels = NetworkKernels(support.shared_bytes);
  for (RowType type : {RowType::kBFloat16, RowType::kFloat16, RowType::kFloat32}) {
    kernels->push_back({HierarchicalCombineKernelAddress(type), kCombineSharedBytes});
    kernels->push_back(
        {HierarchicalLowLatencyCombineKernelAddress(type), kLowLatencyCombineSharedBytes});
    if (only_of_networks) continue;
    kernels->push_back({CombineKernelAddress(type), kCombineSharedBytes});
    kernels->push_back({LowLatencyCombineKernelAddress(type), kLowLatencyCombineSharedBytes});
  }
  if (only_of_networks) return status;
  for (const TransferKernel& kernel : Kernels(support.shared_bytes)) kernels->push_back(kernel);
  return status;
}

Status LoadKernel(const TransferKernel& kernel) {
  return LoadKernel(kernel.address, kernel.shared_bytes, "loading kernels");
}

Status LoadTransferKernels() {
  std::vector<TransferKernel> kernels;
  Status status = ListTransferKernels(false, &kernels);
  for (const TransferKernel& kernel : kernels) {
    if (status.ok()) status = LoadKernel(kernel);
  }
  return status;
}

void ReplaceKernels(KernelReplacements by) {
  replacements.store(new KernelReplacements(std::move(by)), std::memory_order_release);
}

const void* KernelToLaunch(const void* kernel) {
  const KernelReplacements* const by = replacements.load(std::memory_order_acquire);
  if (by == nullptr) return kernel;
  const auto found = by->find(kernel);
  return found == by->end() ? kernel : found->second;
}

Status LaunchStartGeneration(ControlBlock* control, const GenerationState* next,
                             cudaStream_t stream) {
  const StartGenerationParams params = {control, next};
  return LaunchKernels({{.name = "starting a generation",
                         .kernel = StartGenerationKernelAddress(),
                         .blocks = 1,
                         .threads = kStartGenerationThreads,
                         .shared_bytes = 0}},
                       &params, stream);
}

}  // namespace jax_ep
