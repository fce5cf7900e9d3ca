// wgmma: asynchronous matrix instructions of a warpgroup on tiles in shared memory (sm_90a).
#ifndef JAX_EP_DEVICE_PTX_WGMMA_CUH_
#define JAX_EP_DEVICE_PTX_WGMMA_CUH_

#include "ffi/device/ptx/element_types.cuh"
#include "ffi/device/ptx/wgmma_operand.cuh"
#include "ffi/device/ptx/wgmma_statement.cuh"

namespace jax_ep {

// Called before the first Wgmma, and before one whose registers other code has changed.
__device__ inline void WgmmaFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes the group of Wgmma instructions.
__device__ inline void WgmmaCommitGroup() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits for all groups but the latest kPending.
template <int kPending>
__device__ inline void WgmmaWaitGroup() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of the accumulators across it: the waits above do not name
// them.
template <int kCount>
__device__ inline void FenceAccumulators(float (&accumulators)[kCount]) {
#pragma unroll
  for (float& value : accumulators) asm volatile("" : "+f"(value)::"memory");
}

// accumulators[64x256] = a[64x16] * b[16x256], plus accumulators if `accumulate`. In lane l of warp
// w of the warpgroup, accumulators[4 * j + 2 * h + i] is row 16 * w + 8 * h + l / 4, column 8 * j +
// 2 * (l % 4) + i. `a` and `b` are from SharedMemoryDescriptor.
template <typename T, MajorMode kMajorA, MajorMode kMajorB>
__device__ void Wgmma(float (&accumulators)[128], uint32_t a, uint32_t b, bool accumulate);

#define JAX_EP_WGMMA(TYPE, NAME, MAJOR_A, MAJOR_B)                                                 \
  template <>                                                                                      \
  __device__ inline void Wgmma<TYPE, MajorMode::MAJOR_A, MajorMode::MAJOR_B>(                      \
      float (&accumulators)[128], uint32_t a, uint32_t b, bool accumulate) {                       \
    asm volatile(                                                                                  \
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %130, 0;\n.reg .b64 a, b;\n"           \
        "mov.b64 a, {%128, " JAX_EP_WGMMA_DESCRIPTOR                                               \
        "};\n"                                                                                     \
        "mov.b64 b, {%129, " JAX_EP_WGMMA_DESCRIPTOR                                               \
        "};\n"                                                                                     \
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." NAME "." NAME                               \
        " {"                                                                                       \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                   \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "         \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "         \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "         \
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "         \
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "         \
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "   \
        "%111, "                                                                                   \
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, "     \
        "%126, %127 "                                                                              \
        "}, a, b, accumulate, 1, 1, %131, %132;\n}"                                                \
        : JAX_EP_WGMMA_REGISTERS32(0), JAX_EP_WGMMA_REGISTERS32(32), JAX_EP_WGMMA_REGISTERS32(64), \
          JAX_EP_WGMMA_REGISTERS32(96)                                                             \
        : "r"(a), "r"(b), "r"(static_cast<int>(accumulate)),                                       \
          "n"(MajorMode::MAJOR_A == MajorMode::kMajorMN),                                          \
          "n"(MajorMode::MAJOR_B == MajorMode::kMajorMN));                                         \
  }
JAX_EP_WGMMA(BFloat16, "bf16", kMajorK, kMajorK)
JAX_EP_WGMMA(BFloat16, "bf16", kMajorK, kMajorMN)
JAX_EP_WGMMA(BFloat16, "bf16", kMajorMN, kMajorMN)
JAX_EP_WGMMA(Float16, "f16", kMajorK, kMajorK)
JAX_EP_WGMMA(Float16, "f16", kMajorK, kMajorMN)
JAX_EP_WGMMA(Float16, "f16", kMajorMN, kMajorMN)
#undef JAX_EP_WGMMA

// Set the number of registers per thread of the calling warpgroup, a multiple of 8.
template <int kCount>
__device__ inline void WarpgroupRegisterAlloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ inline void WarpgroupRegisterDealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_WGMMA_CUH_
