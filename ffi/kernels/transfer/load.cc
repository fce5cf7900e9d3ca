#include <utility>
#include <vector>

#include "ffi/kernels/transfer/launch.h"
#include "ffi/kernels/transfer/preparation.h"
#include "ffi/runtime/cuda/device_cuda.h"

namespace jax_ep {

Status LoadTransferKernels() {
  RowCopySupport support;
  Status status = FindRowCopySupport(&support);
  std::vector<std::pair<const void*, int>> kernels = {
      {DispatchKernelAddress(), support.shared_bytes},
      {RedispatchKernelAddress(), support.shared_bytes},
      {HierarchicalDispatchKernelAddress(), support.shared_bytes},
      {HierarchicalRedispatchKernelAddress(), support.shared_bytes},
      {BulkCopyCeilingKernelAddress(), support.shared_bytes},
      {StartGenerationKernelAddress(), 0},
      {LowLatencyDispatchKernelAddress(), kMinSharedBytes},
      {HierarchicalLowLatencyDispatchKernelAddress(), kMinSharedBytes},
      {HierarchicalLowLatencyRedispatchKernelAddress(), 0},
      {LowLatencyRedispatchKernelAddress(), 0}};
  for (RowType type : {RowType::kBFloat16, RowType::kFloat16, RowType::kFloat32}) {
    kernels.emplace_back(CombineKernelAddress(type), kCombineSharedBytes);
    kernels.emplace_back(HierarchicalCombineKernelAddress(type), kCombineSharedBytes);
    kernels.emplace_back(LowLatencyCombineKernelAddress(type), kLowLatencyCombineSharedBytes);
    kernels.emplace_back(HierarchicalLowLatencyCombineKernelAddress(type),
                         kLowLatencyCombineSharedBytes);
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
  const StartGenerationParams params = {control, next};
  return LaunchKernels({{.name = "starting a generation",
                         .kernel = StartGenerationKernelAddress(),
                         .blocks = 1,
                         .threads = kStartGenerationThreads,
                         .shared_bytes = 0}},
                       &params, stream);
}

}  // namespace jax_ep
