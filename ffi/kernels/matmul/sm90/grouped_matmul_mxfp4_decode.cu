// Grouped matmul of a few bfloat16 rows and MXFP4 weights, for sm_90a: reading the weights bounds
// it. Consumers expand four bits to bfloat16 on the way from shared memory and multiply by
// mma.sync.
#include "ffi/device/matmul/sm90/mxfp4_decode/consumer.cuh"
#include "ffi/device/matmul/sm90/mxfp4_decode/epilogue.cuh"
#include "ffi/device/matmul/sm90/mxfp4_decode/producer.cuh"
#include "ffi/kernels/matmul/sm90/kernels.h"

namespace jax_ep::sm90 {

template <typename Shape>
__global__ void __launch_bounds__(decode::kThreads, 1)
    GroupedMatmulMxFp4DecodeKernel(const __grid_constant__ MatmulTensorMaps maps,
                                   const __grid_constant__ MatmulParams params,
                                   const __grid_constant__ DecodeScales scales) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr uint32_t kFirstWarps = 1u | 1u << decode::kWarps | 1u << decode::kFirstEpilogueWarp;
  const ProfileKernel profile(ProfiledKernel::kGroupedMatmulMxFp4Decode, kFirstWarps,
                              Shape::kRecorders);
  const decode::Pipeline<Shape> pipeline(SharedAddress(DynamicSharedMemory()));
  if (threadIdx.x == 0) pipeline.InitializeBarriers();
  const int warp = WarpUniform(threadIdx.x / 32);
  decode::Producer<Shape> producer(maps, params, scales, pipeline);
  if (warp == decode::kWarps) {
    if (ElectOne()) {
      PrefetchTensorMap(&maps.a);
      PrefetchTensorMap(&maps.a_narrow);
      PrefetchTensorMap(&maps.b);
    }
    __syncwarp();
    producer.Begin();
  }
  __syncthreads();
  if (warp < decode::kWarps) {
    decode::Consumer<Shape>(scales, pipeline).Run();
  } else if (warp == decode::kWarps) {
    producer.Run();
  } else {
    decode::Epilogue<Shape>(params, pipeline).Run();
  }
#else
  __trap();  // code for compute capability 9.0 must be built for sm_90a
#endif
}

#define JAX_EP_INSTANTIATE(SHAPE)                                                                 \
  template __global__ void GroupedMatmulMxFp4DecodeKernel<SHAPE>(                                 \
      const __grid_constant__ MatmulTensorMaps maps, const __grid_constant__ MatmulParams params, \
      const __grid_constant__ DecodeScales scales);

JAX_EP_INSTANTIATE(decode::WideShape)
JAX_EP_INSTANTIATE(decode::NarrowShape)
#undef JAX_EP_INSTANTIATE

}  // namespace jax_ep::sm90

#ifndef __CUDACC_RTC__  // NVRTC compiles the device code only

namespace jax_ep {

template <typename Shape>
static Sm90Kernel DecodeKernel() {
  return {.kernel = {.address =
                         reinterpret_cast<const void*>(sm90::GroupedMatmulMxFp4DecodeKernel<Shape>),
                     .threads = sm90::decode::kThreads,
                     .shared_bytes = Shape::kBytes,
                     .tile_m = DecodeTiles::kRows,
                     .tile_n = Shape::kColumns},
          .a_box_rows = DecodeTiles::kRows,
          .b_box_rows = Shape::kColumns,
          .a_box_column_blocks = Shape::kParts,
          .a_narrow_box_rows = DecodeTiles::kRowUnit};
}

Sm90Kernel Sm90MxFp4DecodeKernel(bool is_narrow) {
  return is_narrow ? DecodeKernel<sm90::decode::NarrowShape>()
                   : DecodeKernel<sm90::decode::WideShape>();
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
