// Matrix instructions of four warps together on tiles in shared memory (sm_90a).
#ifndef JAX_EP_DEVICE_PTX_WGMMA_CUH_
#define JAX_EP_DEVICE_PTX_WGMMA_CUH_

#include "ffi/device/ptx/element_types.cuh"

namespace jax_ep {

// How a tile lies in shared memory. Both ways, lines of 64 elements (128 bytes) whose chunks of 16
// bytes are permuted as tensor maps with a swizzle of 128 bytes do it; atoms of 8 lines begin at
// multiples of 1024 bytes.
enum class MajorMode {
  kMajorK,  // a line has 64 elements along k; lines follow along m or n
  kMajorMN  // a line has 64 elements along m or n; lines follow along k. Blocks of 64 m or n follow
};

// What an instruction knows of a tile: where it is, in units of 16 bytes, and from 64 elements of m
// or n to the next, if these are in another block (kMajorMN). The rest is the same for all.
__device__ inline uint32_t SharedMemoryDescriptor(uint32_t address, uint32_t block_bytes) {
  return block_bytes >> 4 << 16 | (address & 0x3ffff) >> 4;
}

// Before the first instruction, and before one that uses registers which other code has changed.
__device__ inline void WgmmaFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes a batch of instructions.
__device__ inline void WgmmaCommitGroup() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits for all batches but the last kPending.
template <int kPending>
__device__ inline void WgmmaWaitGroup() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Nothing moves across it that uses the sums, which the waits above do not name.
__device__ inline void FenceAccumulators(float (&sums)[128]) {
#pragma unroll
  for (float& sum : sums) asm volatile("" : "+f"(sum)::"memory");
}

// sums[64 x 256] = left[64 x 16] * right[16 x 256], plus sums if `add`. Of lane l in warp w of the
// four, sums[4 * j + 2 * h + i] is row 16 * w + 8 * h + l / 4, column 8 * j + 2 * (l % 4) + i.
template <typename T, MajorMode kLeft, MajorMode kRight>
__device__ void Wgmma(float (&sums)[128], uint32_t left, uint32_t right, bool add);

// The upper half of a descriptor: atoms of 1024 bytes, and the swizzle of 128 bytes.
#define JAX_EP_DESCRIPTOR "0x40000040"

#define JAX_EP_ACCUMULATORS8(i)                                                              \
  "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]), \
      "+f"(sums[i + 5]), "+f"(sums[i + 6]), "+f"(sums[i + 7])
#define JAX_EP_ACCUMULATORS32(i)                                                      \
  JAX_EP_ACCUMULATORS8(i), JAX_EP_ACCUMULATORS8(i + 8), JAX_EP_ACCUMULATORS8(i + 16), \
      JAX_EP_ACCUMULATORS8(i + 24)

#define JAX_EP_WGMMA(TYPE, NAME, LEFT, RIGHT)                                                    \
  template <>                                                                                    \
  __device__ inline void Wgmma<TYPE, MajorMode::LEFT, MajorMode::RIGHT>(                         \
      float (&sums)[128], uint32_t left, uint32_t right, bool add) {                             \
    asm volatile(                                                                                \
        "{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\n.reg .b64 left, right;\n"                \
        "mov.b64 left, {%128, " JAX_EP_DESCRIPTOR                                                \
        "};\n"                                                                                   \
        "mov.b64 right, {%129, " JAX_EP_DESCRIPTOR                                               \
        "};\n"                                                                                   \
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." NAME "." NAME                             \
        " {"                                                                                     \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                 \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "       \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "       \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "       \
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "       \
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "       \
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, " \
        "%111, "                                                                                 \
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, "   \
        "%126, %127 "                                                                            \
        "}, left, right, add, 1, 1, %131, %132;\n}"                                              \
        : JAX_EP_ACCUMULATORS32(0), JAX_EP_ACCUMULATORS32(32), JAX_EP_ACCUMULATORS32(64),        \
          JAX_EP_ACCUMULATORS32(96)                                                              \
        : "r"(left), "r"(right), "r"(static_cast<int>(add)),                                     \
          "n"(MajorMode::LEFT == MajorMode::kMajorMN),                                           \
          "n"(MajorMode::RIGHT == MajorMode::kMajorMN));                                         \
  }
JAX_EP_WGMMA(BFloat16, "bf16", kMajorK, kMajorK)
JAX_EP_WGMMA(BFloat16, "bf16", kMajorK, kMajorMN)
JAX_EP_WGMMA(BFloat16, "bf16", kMajorMN, kMajorMN)
JAX_EP_WGMMA(Float16, "f16", kMajorK, kMajorK)
JAX_EP_WGMMA(Float16, "f16", kMajorK, kMajorMN)
JAX_EP_WGMMA(Float16, "f16", kMajorMN, kMajorMN)
#undef JAX_EP_WGMMA
#undef JAX_EP_DESCRIPTOR
#undef JAX_EP_ACCUMULATORS32
#undef JAX_EP_ACCUMULATORS8

// How many registers a thread of these four warps has from here on: a multiple of 8.
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
