// A call of a grouped matmul, as the operations describe it to the kernel families.
#ifndef JAX_EP_KERNELS_MATMUL_CALL_H_
#define JAX_EP_KERNELS_MATMUL_CALL_H_

#include <cstddef>
#include <cstdint>
#include <optional>

#include "ffi/device/matmul/params.h"
#include "ffi/runtime/calls/buffers.h"

namespace jax_ep {

// The formats of both 8-bit operands: values of a and b, and the values that share a scale.
enum class Fp8Kind {
  kBlock128,  // E4M3 and E4M3; 1 x 128 of a, 128 x 128 of b
  kRow,       // E4M3 and E4M3; a row of a, a column of a matrix of b
  kRowE5M2    // E5M2 and E4M3, else as kRow
};

struct Fp8Operands {
  Fp8Kind kind;
  const float* a_scales;
  const float* b_scales;
  // kActivation quantizes its results again.
  float* out_scales = nullptr;
  bool power_of_two_scales = false;  // rounds them up
};

// b has MXFP4 values and is [n, k], or with kForward [k, n].
struct MxFp4Weights {
  const uint8_t* scales;   // E8M0, one per 32 values of a row of b
  GateLimits limits = {};  // kActivation reads them
};

struct MatmulCall {
  MatmulKind kind;   // 8-bit operands: kForwardTransposed or kActivation, both with b as [n, k], or
                     // kRhsGradient with both in row blocks (fp8_params.h)
  ElementType type;  // the kernel's: a's
  ElementType out_type;
  int64_t num_sms = 0;                     // 0: all
  std::optional<Fp8Operands> fp8 = {};     // for 8-bit operands
  std::optional<MxFp4Weights> mxfp4 = {};  // for MXFP4 weights: no gradient kind
  // The operands, the shape in elements, the groups, the epilogue and the tile counter. A family
  // fills in the rest.
  MatmulParams params = {};
};

inline bool IsQuantized(const MatmulCall& call) {
  return call.fp8.has_value() || call.mxfp4.has_value();
}

// Returns whether the asynchronous copies, cp.async and TMA, can load an operand: they do not
// convert, and need alignment.
inline bool IsCopyable(const MatmulOperand& operand) {
  return operand.is_aligned && !operand.is_float32;
}

// Kernels are compiled apart from the launch, and recorded by their machine code: the bytes of
// their parameters stay.
static_assert(offsetof(MatmulParams, b) == 24 && offsetof(MatmulParams, out) == 48 &&
              offsetof(MatmulParams, out_is_float32) == 56 &&
              offsetof(MatmulParams, out_is_aligned) == 57 &&
              offsetof(MatmulParams, accumulates) == 58 && offsetof(MatmulParams, shape_m) == 60 &&
              offsetof(MatmulParams, shape_n) == 64 && offsetof(MatmulParams, shape_k) == 68 &&
              offsetof(MatmulParams, out_tile_n) == 72 &&
              offsetof(MatmulParams, b_column_blocks) == 76 &&
              offsetof(MatmulParams, halves_columns) == 80 &&
              offsetof(MatmulParams, halves_rows) == 81 &&
              offsetof(MatmulParams, has_few_pairs) == 82 && offsetof(MatmulParams, groups) == 88 &&
              offsetof(MatmulParams, epilogue) == 112 &&
              offsetof(MatmulParams, tile_counter) == 176 && sizeof(MatmulParams) == 184);

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_MATMUL_CALL_H_
