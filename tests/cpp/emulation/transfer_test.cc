// tests/cpp/gpu/transfer_test.cu on a CPU: emulator.h runs the unchanged kernels.
//
//   transfer_test [--resident N] [the options of tests/cpp/gpu/transfer_test.cu]
//
//   --resident N   blocks of a kernel that run at the same time; default 3
#include <cstdlib>
#include <string_view>

#include "ffi/kernels/transfer/bulk_copy_ceiling.cu"
#include "ffi/kernels/transfer/combine.cu"
#include "ffi/kernels/transfer/dispatch.cu"
#include "ffi/kernels/transfer/low_latency/combine.cu"
#include "ffi/kernels/transfer/low_latency/dispatch.cu"
#include "ffi/kernels/transfer/low_latency/redispatch.cu"
#include "ffi/kernels/transfer/redispatch.cu"

#define main main_of_transfer_test
#include "tests/cpp/gpu/transfer_test.cu"
#undef main

int main(int argc, char** argv) {
  using namespace jax_ep;
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
  emulation::Register(reinterpret_cast<const void*>(harness::ReadArrivals), harness::ReadArrivals);
  for (int i = 1; i + 1 < argc; ++i) {
    const std::string_view name = argv[i];
    if (name == "--resident") emulation::settings.resident_blocks = std::atoi(argv[i + 1]);
    if (name == "--seed") emulation::settings.seed = std::strtoull(argv[i + 1], nullptr, 10);
  }
  return main_of_transfer_test(argc, argv);
}
