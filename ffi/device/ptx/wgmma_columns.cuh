// wgmma with any multiple of 8 columns (sm_90a).
#ifndef JAX_EP_DEVICE_PTX_WGMMA_COLUMNS_CUH_
#define JAX_EP_DEVICE_PTX_WGMMA_COLUMNS_CUH_

#include "ffi/device/ptx/element_types.cuh"
#include "ffi/device/ptx/wgmma.cuh"

namespace jax_ep {

// Issues and commits the MMAs of one k-block of 64, for 8 * (index + 1) columns: accumulators[64 x
// columns] = a * b, plus accumulators if `accumulate`. They are the first of the accumulators,
// ordered as by Wgmma. `a` and `b` are from SharedMemoryDescriptor; b is kMajorK.
//
// The choice is one statement because it has to be fast: one branch through a table. The compiler
// makes several of a switch. Each case commits for itself: a commit that follows all of them would
// be a group of its own, and a wait for all groups but one would wait for the MMAs.
template <typename T, MajorMode kMajorA>
__device__ void WgmmaAnyColumns(float (&accumulators)[128], uint32_t a, uint32_t b, bool accumulate,
                                int index);

// The same for two k-blocks and at most 64 columns. The second k-block lies second_a and second_b
// behind the first.
template <typename T, MajorMode kMajorA>
__device__ void WgmmaFewColumns(float (&accumulators)[128], uint32_t a, uint32_t b,
                                uint32_t second_a, uint32_t second_b, bool accumulate, int index);

#define JAX_EP_R8 "%0, %1, %2, %3"
#define JAX_EP_R16 JAX_EP_R8 ", %4, %5, %6, %7"
#define JAX_EP_R24 JAX_EP_R16 ", %8, %9, %10, %11"
#define JAX_EP_R32 JAX_EP_R24 ", %12, %13, %14, %15"
#define JAX_EP_R40 JAX_EP_R32 ", %16, %17, %18, %19"
#define JAX_EP_R48 JAX_EP_R40 ", %20, %21, %22, %23"
#define JAX_EP_R56 JAX_EP_R48 ", %24, %25, %26, %27"
#define JAX_EP_R64 JAX_EP_R56 ", %28, %29, %30, %31"
#define JAX_EP_R72 JAX_EP_R64 ", %32, %33, %34, %35"
#define JAX_EP_R80 JAX_EP_R72 ", %36, %37, %38, %39"
#define JAX_EP_R88 JAX_EP_R80 ", %40, %41, %42, %43"
#define JAX_EP_R96 JAX_EP_R88 ", %44, %45, %46, %47"
#define JAX_EP_R104 JAX_EP_R96 ", %48, %49, %50, %51"
#define JAX_EP_R112 JAX_EP_R104 ", %52, %53, %54, %55"
#define JAX_EP_R120 JAX_EP_R112 ", %56, %57, %58, %59"
#define JAX_EP_R128 JAX_EP_R120 ", %60, %61, %62, %63"
#define JAX_EP_R136 JAX_EP_R128 ", %64, %65, %66, %67"
#define JAX_EP_R144 JAX_EP_R136 ", %68, %69, %70, %71"
#define JAX_EP_R152 JAX_EP_R144 ", %72, %73, %74, %75"
#define JAX_EP_R160 JAX_EP_R152 ", %76, %77, %78, %79"
#define JAX_EP_R168 JAX_EP_R160 ", %80, %81, %82, %83"
#define JAX_EP_R176 JAX_EP_R168 ", %84, %85, %86, %87"
#define JAX_EP_R184 JAX_EP_R176 ", %88, %89, %90, %91"
#define JAX_EP_R192 JAX_EP_R184 ", %92, %93, %94, %95"
#define JAX_EP_R200 JAX_EP_R192 ", %96, %97, %98, %99"
#define JAX_EP_R208 JAX_EP_R200 ", %100, %101, %102, %103"
#define JAX_EP_R216 JAX_EP_R208 ", %104, %105, %106, %107"
#define JAX_EP_R224 JAX_EP_R216 ", %108, %109, %110, %111"
#define JAX_EP_R232 JAX_EP_R224 ", %112, %113, %114, %115"
#define JAX_EP_R240 JAX_EP_R232 ", %116, %117, %118, %119"
#define JAX_EP_R248 JAX_EP_R240 ", %120, %121, %122, %123"
#define JAX_EP_R256 JAX_EP_R248 ", %124, %125, %126, %127"

// All accumulators are operands, whatever the number of columns, so that all cases number the other
// operands alike: %128 and %129 are the descriptors, %130 is `accumulate`, %131 the index, %132 is
// A's major mode, and %133 to %135 are one to three times its step from MMA to MMA.
#define JAX_EP_WGMMA_ONE(NAME, COLUMNS, A, B, OFFSET_A, OFFSET_B, ACCUMULATE)                  \
  "{\n.reg .b32 word;\n.reg .b64 a, b;\n"                                                      \
  "add.u32 word, " A ", " OFFSET_A ";\nmov.b64 a, {word, " JAX_EP_WGMMA_DESCRIPTOR             \
  "};\n"                                                                                       \
  "add.u32 word, " B ", " OFFSET_B ";\nmov.b64 b, {word, " JAX_EP_WGMMA_DESCRIPTOR             \
  "};\n"                                                                                       \
  "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." NAME "." NAME " {" JAX_EP_R##COLUMNS \
      "}, a, b, " ACCUMULATE ", 1, 1, %132, 0;\n}\n"
#define JAX_EP_WGMMA_FOUR(NAME, COLUMNS, A, B, ACCUMULATE)     \
  JAX_EP_WGMMA_ONE(NAME, COLUMNS, A, B, "0", "0", ACCUMULATE)  \
  JAX_EP_WGMMA_ONE(NAME, COLUMNS, A, B, "%133", "2", "always") \
  JAX_EP_WGMMA_ONE(NAME, COLUMNS, A, B, "%134", "4", "always") \
  JAX_EP_WGMMA_ONE(NAME, COLUMNS, A, B, "%135", "6", "always")
// clang-format off: it changes these lists anew each time
#define JAX_EP_WGMMA_CASE(NAME, COLUMNS)                                   \
  "ONE" #COLUMNS ":\nwgmma.fence.sync.aligned;\n"                          \
  JAX_EP_WGMMA_FOUR(NAME, COLUMNS, "%128", "%129", "accumulate")           \
  "wgmma.commit_group.sync.aligned;\nbra.uni DONE;\n"
#define JAX_EP_WGMMA_TWO_CASE(NAME, COLUMNS)                               \
  "TWO" #COLUMNS ":\nwgmma.fence.sync.aligned;\n"                          \
  JAX_EP_WGMMA_FOUR(NAME, COLUMNS, "%128", "%129", "accumulate")           \
  "add.u32 second_a, %128, %136;\nadd.u32 second_b, %129, %137;\n"         \
  JAX_EP_WGMMA_FOUR(NAME, COLUMNS, "second_a", "second_b", "always")       \
  "wgmma.commit_group.sync.aligned;\nbra.uni DONE;\n"
#define JAX_EP_WGMMA_CASES(NAME)                                           \
  JAX_EP_WGMMA_CASE(NAME, 8) JAX_EP_WGMMA_CASE(NAME, 16)                   \
  JAX_EP_WGMMA_CASE(NAME, 24) JAX_EP_WGMMA_CASE(NAME, 32)                  \
  JAX_EP_WGMMA_CASE(NAME, 40) JAX_EP_WGMMA_CASE(NAME, 48)                  \
  JAX_EP_WGMMA_CASE(NAME, 56) JAX_EP_WGMMA_CASE(NAME, 64)                  \
  JAX_EP_WGMMA_CASE(NAME, 72) JAX_EP_WGMMA_CASE(NAME, 80)                  \
  JAX_EP_WGMMA_CASE(NAME, 88) JAX_EP_WGMMA_CASE(NAME, 96)                  \
  JAX_EP_WGMMA_CASE(NAME, 104) JAX_EP_WGMMA_CASE(NAME, 112)                \
  JAX_EP_WGMMA_CASE(NAME, 120) JAX_EP_WGMMA_CASE(NAME, 128)                \
  JAX_EP_WGMMA_CASE(NAME, 136) JAX_EP_WGMMA_CASE(NAME, 144)                \
  JAX_EP_WGMMA_CASE(NAME, 152) JAX_EP_WGMMA_CASE(NAME, 160)                \
  JAX_EP_WGMMA_CASE(NAME, 168) JAX_EP_WGMMA_CASE(NAME, 176)                \
  JAX_EP_WGMMA_CASE(NAME, 184) JAX_EP_WGMMA_CASE(NAME, 192)                \
  JAX_EP_WGMMA_CASE(NAME, 200) JAX_EP_WGMMA_CASE(NAME, 208)                \
  JAX_EP_WGMMA_CASE(NAME, 216) JAX_EP_WGMMA_CASE(NAME, 224)                \
  JAX_EP_WGMMA_CASE(NAME, 232) JAX_EP_WGMMA_CASE(NAME, 240)                \
  JAX_EP_WGMMA_CASE(NAME, 248) JAX_EP_WGMMA_CASE(NAME, 256)
#define JAX_EP_WGMMA_TWO_CASES(NAME)                                       \
  JAX_EP_WGMMA_TWO_CASE(NAME, 8) JAX_EP_WGMMA_TWO_CASE(NAME, 16)           \
  JAX_EP_WGMMA_TWO_CASE(NAME, 24) JAX_EP_WGMMA_TWO_CASE(NAME, 32)          \
  JAX_EP_WGMMA_TWO_CASE(NAME, 40) JAX_EP_WGMMA_TWO_CASE(NAME, 48)          \
  JAX_EP_WGMMA_TWO_CASE(NAME, 56) JAX_EP_WGMMA_TWO_CASE(NAME, 64)
// clang-format on

#define JAX_EP_WGMMA_BEGIN                                             \
  "{\n.reg .pred accumulate, always;\n.reg .b32 second_a, second_b;\n" \
  "setp.ne.b32 accumulate, %130, 0;\nsetp.eq.b32 always, 0, 0;\n"
#define JAX_EP_WGMMA_ACCUMULATORS                                                          \
  JAX_EP_WGMMA_REGISTERS32(0), JAX_EP_WGMMA_REGISTERS32(32), JAX_EP_WGMMA_REGISTERS32(64), \
      JAX_EP_WGMMA_REGISTERS32(96)
#define JAX_EP_WGMMA_OPERANDS(MAJOR_A, STEP)                     \
  "r"(a), "r"(b), "r"(static_cast<int>(accumulate)), "r"(index), \
      "n"(MajorMode::MAJOR_A == MajorMode::kMajorMN), "n"(STEP), "n"(2 * STEP), "n"(3 * STEP)

#define JAX_EP_WGMMA_ANY(TYPE, NAME, MAJOR_A, STEP)                                             \
  template <>                                                                                   \
  __device__ inline void WgmmaAnyColumns<TYPE, MajorMode::MAJOR_A>(                             \
      float (&accumulators)[128], uint32_t a, uint32_t b, bool accumulate, int index) {         \
    asm volatile(JAX_EP_WGMMA_BEGIN                                                             \
                 "CASES: .branchtargets " JAX_EP_WGMMA_TARGETS                                  \
                 ";\nbrx.idx.uni %131, CASES;\n" JAX_EP_WGMMA_CASES(NAME) "DONE:\n}"            \
                 : JAX_EP_WGMMA_ACCUMULATORS                                                    \
                 : JAX_EP_WGMMA_OPERANDS(MAJOR_A, STEP)                                         \
                 : "memory");                                                                   \
  }                                                                                             \
  template <>                                                                                   \
  __device__ inline void WgmmaFewColumns<TYPE, MajorMode::MAJOR_A>(                             \
      float (&accumulators)[128], uint32_t a, uint32_t b, uint32_t second_a, uint32_t second_b, \
      bool accumulate, int index) {                                                             \
    asm volatile(JAX_EP_WGMMA_BEGIN                                                             \
                 "CASES: .branchtargets " JAX_EP_WGMMA_TWO_TARGETS                              \
                 ";\nbrx.idx.uni %131, CASES;\n" JAX_EP_WGMMA_TWO_CASES(NAME) "DONE:\n}"        \
                 : JAX_EP_WGMMA_ACCUMULATORS                                                    \
                 : JAX_EP_WGMMA_OPERANDS(MAJOR_A, STEP), "r"(second_a), "r"(second_b)           \
                 : "memory");                                                                   \
  }
#define JAX_EP_WGMMA_TARGETS                                         \
  "ONE8, ONE16, ONE24, ONE32, ONE40, ONE48, ONE56, ONE64, "          \
  "ONE72, ONE80, ONE88, ONE96, ONE104, ONE112, ONE120, ONE128, "     \
  "ONE136, ONE144, ONE152, ONE160, ONE168, ONE176, ONE184, ONE192, " \
  "ONE200, ONE208, ONE216, ONE224, ONE232, ONE240, ONE248, ONE256"
#define JAX_EP_WGMMA_TWO_TARGETS "TWO8, TWO16, TWO24, TWO32, TWO40, TWO48, TWO56, TWO64"
JAX_EP_WGMMA_ANY(BFloat16, "bf16", kMajorK, 2)
JAX_EP_WGMMA_ANY(BFloat16, "bf16", kMajorMN, 128)
JAX_EP_WGMMA_ANY(Float16, "f16", kMajorK, 2)
JAX_EP_WGMMA_ANY(Float16, "f16", kMajorMN, 128)
#undef JAX_EP_WGMMA_ANY

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_WGMMA_COLUMNS_CUH_
