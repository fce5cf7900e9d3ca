// The kernels for sm_90a, and their families: of 16-bit operands, and of 8-bit ones with scales.
#ifndef JAX_EP_KERNELS_MATMUL_SM90_KERNELS_H_
#define JAX_EP_KERNELS_MATMUL_SM90_KERNELS_H_

#include "ffi/device/matmul/params.h"
#include "ffi/kernels/matmul/kernel.h"
#ifndef __CUDACC_RTC__
#include "ffi/kernels/matmul/call.h"
#include "ffi/kernels/matmul/family.h"

namespace jax_ep {

// Takes MatmulTensorMaps before MatmulParams: these are the TMA boxes.
struct Sm90Kernel {
  MatmulKernel kernel;
  // The kernel with SwappedWideTilePairs, for 16-bit results; null: there is no such kernel.
  const void* wide_address = nullptr;
  int a_box_rows;
  int b_box_rows;
  int a_box_column_blocks = 1;  // rows of a consist of whole ones if there are several
  int b_box_column_blocks = 1;  // used if the rows of b consist of whole column blocks

  // For kernels with swapped operands. Boxes of narrow tiles have one column block.
  int a_narrow_box_rows = 0;  // 0: there are no narrow tiles
  int b_narrow_box_rows = 0;
  int float32_box_rows = 0;  // boxes of float32 results; 0: as of 16-bit ones
  int float32_box_columns = 0;
  bool has_half_tiles = false;  // narrow tiles may have half of the columns
};

// Return the kernels of 16-bit operands. They take aligned ones with at least one row and column,
// and tensor maps of both operands and of the result.
Sm90Kernel Sm90RhsGradientKernel(bool is_bfloat16);
Sm90Kernel Sm90SwappedMatmulKernel(bool is_bfloat16, MatmulKind kind);  // all other kinds
inline Sm90Kernel Sm90MatmulKernel(bool is_bfloat16, MatmulKind kind) {
  return kind == MatmulKind::kRhsGradient ? Sm90RhsGradientKernel(is_bfloat16)
                                          : Sm90SwappedMatmulKernel(is_bfloat16, kind);
}
inline constexpr int kSm90ColumnBlock = 64;  // columns
inline constexpr int kSm90OutBoxRows = 16;

// Up to this many 8-bit values along K, the ends of tiles are a large part of the time.
inline constexpr int64_t kFp8ShortK = 1024;

// Returns the kernel of 8-bit operands. It takes Fp8Scales last. Both forms compute the same bits.
Sm90Kernel Fp8MatmulKernel(Fp8Kind kind, bool is_short);

// Returns the kernel of kBlock128 with a gated activation, whose results are quantized.
Sm90Kernel Fp8ActivationKernel();

// Returns the kernel of weight gradients of kBlock128, whose operands are in row blocks
// (fp8_params.h). It takes Fp8Scales last. Both forms compute the same bits.
Sm90Kernel Fp8RhsGradientKernel(bool is_short);

// Returns the kernel of bfloat16 rows and MXFP4 weights. It takes MxFp4Scales last.
Sm90Kernel Sm90MxFp4MatmulKernel();

// Returns the same for a few rows, which is faster if groups have up to 16. It takes DecodeScales
// last. Its narrow tiles have half as many columns, and other bits.
Sm90Kernel Sm90MxFp4DecodeKernel(bool is_narrow);

// Returns the same with an activation. It takes GateLimits last.
Sm90Kernel Sm90MxFp4ActivationKernel();

// Returns the kernel that contracts the columns of MXFP4 weights. It takes their scales last.
Sm90Kernel Sm90MxFp4LhsGradientKernel();

const MatmulFamily& Sm90Matmuls();
const MatmulFamily& Sm90Fp8Matmuls();
const MatmulFamily& Sm90MxFp4Matmuls();

inline constexpr ComputeCapability kSm90 = {9, 0};

}  // namespace jax_ep
#endif

#endif  // JAX_EP_KERNELS_MATMUL_SM90_KERNELS_H_
