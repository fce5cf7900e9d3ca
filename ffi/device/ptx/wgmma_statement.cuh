// The statements of wgmma.cuh and wgmma_fp8.cuh: macros, because PTX is literal.
#ifndef JAX_EP_DEVICE_PTX_WGMMA_STATEMENT_CUH_
#define JAX_EP_DEVICE_PTX_WGMMA_STATEMENT_CUH_

// The upper word of a descriptor: 1024 bytes between atoms, 128-byte swizzle.
#define JAX_EP_WGMMA_DESCRIPTOR "0x40000040"

#define JAX_EP_WGMMA_REGISTERS8(i)                                                     \
  "+f"(accumulators[i]), "+f"(accumulators[i + 1]), "+f"(accumulators[i + 2]),         \
      "+f"(accumulators[i + 3]), "+f"(accumulators[i + 4]), "+f"(accumulators[i + 5]), \
      "+f"(accumulators[i + 6]), "+f"(accumulators[i + 7])
#define JAX_EP_WGMMA_REGISTERS32(i)                                                            \
  JAX_EP_WGMMA_REGISTERS8(i), JAX_EP_WGMMA_REGISTERS8(i + 8), JAX_EP_WGMMA_REGISTERS8(i + 16), \
      JAX_EP_WGMMA_REGISTERS8(i + 24)

// m64n128 on `accumulators`, `a`, `b` and `accumulate`. TYPES has k and the types, as in
// "k16.f32.bf16.bf16"; MAJORNESS that of 16-bit operands, as in ", 0, 1".
#define JAX_EP_WGMMA_N128(TYPES, MAJORNESS)                                              \
  asm volatile(                                                                          \
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %66, 0;\n.reg .b64 a, b;\n"    \
      "mov.b64 a, {%64, " JAX_EP_WGMMA_DESCRIPTOR                                        \
      "};\n"                                                                             \
      "mov.b64 b, {%65, " JAX_EP_WGMMA_DESCRIPTOR                                        \
      "};\n"                                                                             \
      "wgmma.mma_async.sync.aligned.m64n128" TYPES                                       \
      " {"                                                                               \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"   \
      "}, a, b, accumulate, 1, 1" MAJORNESS ";\n}"                                       \
      : JAX_EP_WGMMA_REGISTERS32(0), JAX_EP_WGMMA_REGISTERS32(32)                        \
      : "r"(a), "r"(b), "r"(static_cast<int>(accumulate)))

#endif  // JAX_EP_DEVICE_PTX_WGMMA_STATEMENT_CUH_
