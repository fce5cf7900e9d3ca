// The kernels of a grouped matmul, as the launch sees them.
#ifndef JAX_EP_KERNELS_MATMUL_KERNELS_H_
#define JAX_EP_KERNELS_MATMUL_KERNELS_H_

#include "ffi/device/matmul/params.h"
#ifndef __CUDACC_RTC__
#include "ffi/runtime/calls/buffers.h"
#endif

namespace jax_ep {

// A persistent kernel. Every number of blocks gives the same result; one block per SM is fastest.
struct MatmulKernel {
  const void* address;  // null: there is no such kernel
  // The kernel with SwappedWideTilePairs, for 16-bit results; null: there is no such kernel.
  const void* wide_address = nullptr;
  int threads;
  int cluster_blocks = 1;  // blocks per cluster; the grid is a multiple of it
  int shared_bytes;
  int tile_m;
  int tile_n;
  int store_elements = 1;  // elements that a thread stores at once if MatmulParams::out_is_aligned

  // For kernels that take MatmulTensorMaps before MatmulParams: the TMA boxes.
  int a_box_rows = 0;  // 0: the kernel takes MatmulParams only
  int b_box_rows = 0;
  int b_box_column_blocks = 1;  // used if the rows of b consist of whole column blocks

  // For kernels with swapped operands. Boxes of narrow tiles have one column block.
  int a_narrow_box_rows = 0;  // 0: there are no narrow tiles
  int b_narrow_box_rows = 0;
  int float32_box_rows = 0;  // boxes of float32 results; 0: as of 16-bit ones
  int float32_box_columns = 0;
  bool has_half_tiles = false;  // narrow tiles may have half of the columns
};

#ifndef __CUDACC_RTC__
// Return the kernels for sm_90a. They take aligned 16-bit operands with at least one row and
// column, and tensor maps of both operands and of the result.
MatmulKernel Sm90RhsGradientKernel(bool is_bfloat16);
MatmulKernel Sm90SwappedMatmulKernel(bool is_bfloat16, MatmulKind kind);  // all other kinds
inline MatmulKernel Sm90MatmulKernel(bool is_bfloat16, MatmulKind kind) {
  return kind == MatmulKind::kRhsGradient ? Sm90RhsGradientKernel(is_bfloat16)
                                          : Sm90SwappedMatmulKernel(is_bfloat16, kind);
}
inline constexpr int kSm90ColumnBlock = 64;  // columns
inline constexpr int kSm90OutBoxRows = 16;

// Return the kernels for every GPU since sm_80; they have no kActivationGradient. use_cp_async is
// faster. It requires that both operands are aligned and have 16-bit elements.
MatmulKernel Portable16BitMatmulKernel(bool is_bfloat16, MatmulKind kind, bool use_cp_async);
MatmulKernel PortableFloat32MatmulKernel(MatmulKind kind);

// Returns the kernel that makes kActivationGradient of kForwardTransposed's result.
MatmulKernel PortableActivationGradientKernel(ElementType type);
#endif

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_MATMUL_KERNELS_H_
