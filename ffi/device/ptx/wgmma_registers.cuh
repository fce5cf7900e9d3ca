// wgmma with a in registers and any multiple of 8 columns (sm_90a).
#ifndef JAX_EP_DEVICE_PTX_WGMMA_REGISTERS_CUH_
#define JAX_EP_DEVICE_PTX_WGMMA_REGISTERS_CUH_

#include "ffi/device/common/integers.h"
#include "ffi/device/ptx/wgmma_columns.cuh"

namespace jax_ep {

// The words of `a` per thread for one k-block of 64.
inline constexpr int kWgmmaRegisters = 16;

// WgmmaAnyColumns of bfloat16 with `a` in registers. Word 4 * s + 2 * j + h of lane l of warp w is
// row 16 * w + 8 * h + l / 4, k 16 * s + 8 * j + 2 * (l % 4) and the next. The MMAs read the words
// until they are complete: FenceRegisters has to follow the wait for that.
__device__ inline void WgmmaRegistersAnyColumns(float (&accumulators)[128],
                                                const uint32_t (&a)[kWgmmaRegisters], uint32_t b,
                                                bool accumulate, int index);

// The same of at most 64 columns, with fewer branches.
__device__ inline void WgmmaRegistersFewColumns(float (&accumulators)[128],
                                                const uint32_t (&a)[kWgmmaRegisters], uint32_t b,
                                                bool accumulate, int index);

// Keeps the compiler from giving the registers to other values before this point.
template <int kCount>
__device__ inline void FenceRegisters(uint32_t (&words)[kCount]) {
#pragma unroll
  for (uint32_t& word : words) asm volatile("" : "+r"(word)::"memory");
}

// All accumulators are operands, whatever the number of columns. %128 to %143 are a, %144 is b's
// descriptor, %145 `accumulate`, and %146 the index.
#define JAX_EP_WGMMA_ONE_REGISTERS(COLUMNS, A, OFFSET_B, ACCUMULATE)                   \
  "add.u32 word, %144, " OFFSET_B ";\nmov.b64 b, {word, " JAX_EP_WGMMA_DESCRIPTOR      \
  "};\n"                                                                               \
  "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32.bf16.bf16 {" JAX_EP_R##COLUMNS \
      "}, {" A "}, b, " ACCUMULATE ", 1, 1, 0;\n"
// clang-format off: it changes these lists anew each time
#define JAX_EP_WGMMA_REGISTERS_CASE(COLUMNS)                                          \
  "REGISTERS" #COLUMNS ":\nwgmma.fence.sync.aligned;\n"                               \
  JAX_EP_WGMMA_ONE_REGISTERS(COLUMNS, "%128, %129, %130, %131", "0", "accumulate")    \
  JAX_EP_WGMMA_ONE_REGISTERS(COLUMNS, "%132, %133, %134, %135", "2", "always")        \
  JAX_EP_WGMMA_ONE_REGISTERS(COLUMNS, "%136, %137, %138, %139", "4", "always")        \
  JAX_EP_WGMMA_ONE_REGISTERS(COLUMNS, "%140, %141, %142, %143", "6", "always")        \
  "wgmma.commit_group.sync.aligned;\nbra.uni DONE;\n"
#define JAX_EP_WGMMA_REGISTERS_FEW_CASES                              \
  JAX_EP_WGMMA_REGISTERS_CASE(8) JAX_EP_WGMMA_REGISTERS_CASE(16)      \
  JAX_EP_WGMMA_REGISTERS_CASE(24) JAX_EP_WGMMA_REGISTERS_CASE(32)     \
  JAX_EP_WGMMA_REGISTERS_CASE(40) JAX_EP_WGMMA_REGISTERS_CASE(48)     \
  JAX_EP_WGMMA_REGISTERS_CASE(56) JAX_EP_WGMMA_REGISTERS_CASE(64)
#define JAX_EP_WGMMA_REGISTERS_MANY_CASES                             \
  JAX_EP_WGMMA_REGISTERS_CASE(72) JAX_EP_WGMMA_REGISTERS_CASE(80)     \
  JAX_EP_WGMMA_REGISTERS_CASE(88) JAX_EP_WGMMA_REGISTERS_CASE(96)     \
  JAX_EP_WGMMA_REGISTERS_CASE(104) JAX_EP_WGMMA_REGISTERS_CASE(112)   \
  JAX_EP_WGMMA_REGISTERS_CASE(120) JAX_EP_WGMMA_REGISTERS_CASE(128)   \
  JAX_EP_WGMMA_REGISTERS_CASE(136) JAX_EP_WGMMA_REGISTERS_CASE(144)   \
  JAX_EP_WGMMA_REGISTERS_CASE(152) JAX_EP_WGMMA_REGISTERS_CASE(160)   \
  JAX_EP_WGMMA_REGISTERS_CASE(168) JAX_EP_WGMMA_REGISTERS_CASE(176)   \
  JAX_EP_WGMMA_REGISTERS_CASE(184) JAX_EP_WGMMA_REGISTERS_CASE(192)   \
  JAX_EP_WGMMA_REGISTERS_CASE(200) JAX_EP_WGMMA_REGISTERS_CASE(208)   \
  JAX_EP_WGMMA_REGISTERS_CASE(216) JAX_EP_WGMMA_REGISTERS_CASE(224)   \
  JAX_EP_WGMMA_REGISTERS_CASE(232) JAX_EP_WGMMA_REGISTERS_CASE(240)   \
  JAX_EP_WGMMA_REGISTERS_CASE(248) JAX_EP_WGMMA_REGISTERS_CASE(256)
#define JAX_EP_WGMMA_REGISTERS_FEW_TARGETS                                     \
  "REGISTERS8, REGISTERS16, REGISTERS24, REGISTERS32, "                        \
  "REGISTERS40, REGISTERS48, REGISTERS56, REGISTERS64"
#define JAX_EP_WGMMA_REGISTERS_MANY_TARGETS                                    \
  "REGISTERS72, REGISTERS80, REGISTERS88, REGISTERS96, "                       \
  "REGISTERS104, REGISTERS112, REGISTERS120, REGISTERS128, "                   \
  "REGISTERS136, REGISTERS144, REGISTERS152, REGISTERS160, "                   \
  "REGISTERS168, REGISTERS176, REGISTERS184, REGISTERS192, "                   \
  "REGISTERS200, REGISTERS208, REGISTERS216, REGISTERS224, "                   \
  "REGISTERS232, REGISTERS240, REGISTERS248, REGISTERS256"
// clang-format on

#define JAX_EP_WGMMA_REGISTERS(NAME, TARGETS, CASES)                                              \
  __device__ inline void NAME(float (&accumulators)[128], const uint32_t (&a)[kWgmmaRegisters],   \
                              uint32_t b, bool accumulate, int index) {                           \
    asm volatile(                                                                                 \
        "{\n.reg .pred accumulate, always;\n.reg .b32 word;\n.reg .b64 b;\n"                      \
        "setp.ne.b32 accumulate, %145, 0;\nsetp.eq.b32 always, 0, 0;\n"                           \
        "CASES: .branchtargets " TARGETS ";\nbrx.idx.uni %146, CASES;\n" CASES "DONE:\n}"         \
        : JAX_EP_WGMMA_ACCUMULATORS                                                               \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), \
          "r"(a[8]), "r"(a[9]), "r"(a[10]), "r"(a[11]), "r"(a[12]), "r"(a[13]), "r"(a[14]),       \
          "r"(a[15]), "r"(b), "r"(static_cast<int>(accumulate)), "r"(index)                       \
        : "memory");                                                                              \
  }
JAX_EP_WGMMA_REGISTERS(WgmmaRegistersFewColumns, JAX_EP_WGMMA_REGISTERS_FEW_TARGETS,
                       JAX_EP_WGMMA_REGISTERS_FEW_CASES)
JAX_EP_WGMMA_REGISTERS(WgmmaRegistersAnyColumns,
                       JAX_EP_WGMMA_REGISTERS_FEW_TARGETS ", " JAX_EP_WGMMA_REGISTERS_MANY_TARGETS,
                       JAX_EP_WGMMA_REGISTERS_FEW_CASES JAX_EP_WGMMA_REGISTERS_MANY_CASES)

#undef JAX_EP_WGMMA_REGISTERS
#undef JAX_EP_WGMMA_REGISTERS_FEW_TARGETS
#undef JAX_EP_WGMMA_REGISTERS_FEW_CASES
#undef JAX_EP_WGMMA_REGISTERS_MANY_TARGETS
#undef JAX_EP_WGMMA_REGISTERS_MANY_CASES
#undef JAX_EP_WGMMA_REGISTERS_CASE
#undef JAX_EP_WGMMA_ONE_REGISTERS

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_WGMMA_REGISTERS_CUH_
