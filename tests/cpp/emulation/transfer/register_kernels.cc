// All transfer kernels, compiled for the emulator.
#include "tests/cpp/emulation/transfer/register_kernels.h"

#include "cuda_runtime_api.h"
#include "ffi/device/common/architecture.cuh"
#include "ffi/kernels/transfer/bulk_copy_ceiling.cu"
#include "ffi/kernels/transfer/combine.cu"
#include "ffi/kernels/transfer/dispatch.cu"
#include "ffi/kernels/transfer/hierarchical/combine.cu"
#include "ffi/kernels/transfer/hierarchical/dispatch.cu"
#include "ffi/kernels/transfer/hierarchical/low_latency_combine.cu"
#include "ffi/kernels/transfer/hierarchical/low_latency_dispatch.cu"
#include "ffi/kernels/transfer/hierarchical/low_latency_redispatch.cu"
#include "ffi/kernels/transfer/hierarchical/redispatch.cu"
#include "ffi/kernels/transfer/low_latency/combine.cu"
#include "ffi/kernels/transfer/low_latency/dispatch.cu"
#include "ffi/kernels/transfer/low_latency/redispatch.cu"
#include "ffi/kernels/transfer/redispatch.cu"
#include "ffi/kernels/transfer/start_generation.cu"

void RegisterKernels() {
  using namespace jax_ep;
  emulation::settings.major = CompiledArchitecture() / 100;
  emulation::Register(StartGenerationKernelAddress(), StartGenerationKernel);
  emulation::Register(DispatchKernelAddress(), DispatchKernel);
  emulation::Register(RedispatchKernelAddress(), RedispatchKernel);
  emulation::Register(CombineKernelAddress(RowType::kBFloat16), CombineKernel<BFloat16>);
  emulation::Register(CombineKernelAddress(RowType::kFloat16), CombineKernel<Float16>);
  emulation::Register(CombineKernelAddress(RowType::kFloat32), CombineKernel<Float32>);
  emulation::Register(LowLatencyDispatchKernelAddress(), LowLatencyDispatchKernel);
  emulation::Register(LowLatencyRedispatchKernelAddress(), LowLatencyRedispatchKernel);
  emulation::Register(LowLatencyCombineKernelAddress(RowType::kBFloat16),
                      LowLatencyCombineKernel<BFloat16>);
  emulation::Register(LowLatencyCombineKernelAddress(RowType::kFloat16),
                      LowLatencyCombineKernel<Float16>);
  emulation::Register(LowLatencyCombineKernelAddress(RowType::kFloat32),
                      LowLatencyCombineKernel<Float32>);
  emulation::Register(BulkCopyCeilingKernelAddress(), BulkCopyCeilingKernel);
  emulation::Register(HierarchicalDispatchKernelAddress(), HierarchicalDispatchKernel);
  emulation::Register(HierarchicalRedispatchKernelAddress(), HierarchicalRedispatchKernel);
  emulation::Register(HierarchicalCombineKernelAddress(RowType::kBFloat16),
                      HierarchicalCombineKernel<BFloat16>);
  emulation::Register(HierarchicalCombineKernelAddress(RowType::kFloat16),
                      HierarchicalCombineKernel<Float16>);
  emulation::Register(HierarchicalCombineKernelAddress(RowType::kFloat32),
                      HierarchicalCombineKernel<Float32>);
  emulation::Register(HierarchicalLowLatencyDispatchKernelAddress(),
                      HierarchicalLowLatencyDispatchKernel);
  emulation::Register(HierarchicalLowLatencyRedispatchKernelAddress(),
                      HierarchicalLowLatencyRedispatchKernel);
  emulation::Register(HierarchicalLowLatencyCombineKernelAddress(RowType::kBFloat16),
                      HierarchicalLowLatencyCombineKernel<BFloat16>);
  emulation::Register(HierarchicalLowLatencyCombineKernelAddress(RowType::kFloat16),
                      HierarchicalLowLatencyCombineKernel<Float16>);
  emulation::Register(HierarchicalLowLatencyCombineKernelAddress(RowType::kFloat32),
                      HierarchicalLowLatencyCombineKernel<Float32>);
}
