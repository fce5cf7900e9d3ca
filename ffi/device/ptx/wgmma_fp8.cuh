// wgmma on 8-bit floats: asynchronous matrix instructions of a warpgroup (sm_90a).
//
// The tensor cores add 8-bit products with about 14 bits. Sums of many products need a second set
// of accumulators, to which the warpgroup's threads add in float32.
#ifndef JAX_EP_DEVICE_PTX_WGMMA_FP8_CUH_
#define JAX_EP_DEVICE_PTX_WGMMA_FP8_CUH_

#include "ffi/device/ptx/wgmma.cuh"

namespace jax_ep {

// Element types: E4M3 holds values up to 448, E5M2 up to 57344.
struct Float8E4M3 {};
struct Float8E5M2 {};

// products[64x128] = a[64x32] * b[32x128], plus products if `accumulate`. Both operands are K-major
// lines of 128 elements (128 bytes) with the 128-byte swizzle; the descriptors and the order of
// `products` are those of wgmma.cuh.
template <typename A, typename B>
__device__ void WgmmaFp8(float (&products)[64], uint32_t a, uint32_t b, bool accumulate);

// The upper word of a descriptor: 1024 bytes between atoms, 128-byte swizzle.
#define JAX_EP_DESCRIPTOR "0x40000040"

#define JAX_EP_PRODUCTS8(i)                                                               \
  "+f"(products[i]), "+f"(products[i + 1]), "+f"(products[i + 2]), "+f"(products[i + 3]), \
      "+f"(products[i + 4]), "+f"(products[i + 5]), "+f"(products[i + 6]), "+f"(products[i + 7])

#define JAX_EP_WGMMA_FP8(A, B, NAME_A, NAME_B)                                                   \
  template <>                                                                                    \
  __device__ inline void WgmmaFp8<A, B>(float (&products)[64], uint32_t a, uint32_t b,           \
                                        bool accumulate) {                                       \
    asm volatile(                                                                                \
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %66, 0;\n.reg .b64 a, b;\n"          \
        "mov.b64 a, {%64, " JAX_EP_DESCRIPTOR                                                    \
        "};\n"                                                                                   \
        "mov.b64 b, {%65, " JAX_EP_DESCRIPTOR                                                    \
        "};\n"                                                                                   \
        "wgmma.mma_async.sync.aligned.m64n128k32.f32." NAME_A "." NAME_B                         \
        " {"                                                                                     \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                 \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "       \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "       \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"         \
        "}, a, b, accumulate, 1, 1;\n}"                                                          \
        : JAX_EP_PRODUCTS8(0), JAX_EP_PRODUCTS8(8), JAX_EP_PRODUCTS8(16), JAX_EP_PRODUCTS8(24),  \
          JAX_EP_PRODUCTS8(32), JAX_EP_PRODUCTS8(40), JAX_EP_PRODUCTS8(48), JAX_EP_PRODUCTS8(56) \
        : "r"(a), "r"(b), "r"(static_cast<int>(accumulate)));                                    \
  }
JAX_EP_WGMMA_FP8(Float8E4M3, Float8E4M3, "e4m3", "e4m3")
JAX_EP_WGMMA_FP8(Float8E5M2, Float8E4M3, "e5m2", "e4m3")
#undef JAX_EP_WGMMA_FP8
#undef JAX_EP_PRODUCTS8
#undef JAX_EP_DESCRIPTOR

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_WGMMA_FP8_CUH_
