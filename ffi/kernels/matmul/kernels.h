// The kernels of a grouped matmul, for the launch.
#ifndef JAX_EP_KERNELS_MATMUL_KERNELS_H_
#define JAX_EP_KERNELS_MATMUL_KERNELS_H_

#include "ffi/device/matmul/problem.h"
#ifndef __CUDACC_RTC__
#include "ffi/runtime/buffers.h"
#endif

namespace jax_ep {

// Any number of blocks, or of clusters, gives the same result, one for each multiprocessor at most
// the best time.
struct MatmulKernel {
  const void* address;  // of a kernel with MatmulTensorMaps, if it takes them, and MatmulProblem
  int threads;
  int cluster_blocks = 1;  // of a cluster: the grid is a multiple of it
  int shared_bytes;
  int tile_m;
  int tile_n;
  int stored_elements = 1;  // that a lane stores at once if MatmulProblem::out_is_aligned
  int left_lines = 0;  // of a box of the left operand's tensor map, if the kernel takes such maps
  int right_lines = 0;
  int right_blocks = 1;  // side by side in a box, of kColumnsPerBlock each, if all blocks are whole
};

#ifndef __CUDACC_RTC__
// Neither this nor SixteenBitMatmulKernel has kActivationGradient.
MatmulKernel Float32MatmulKernel(MatmulKind kind);

// On sm_90a: both operands as above, and of rows of more than nothing. With tensor maps of both,
// and of the result in boxes of so many lines.
MatmulKernel Sm90MatmulKernel(bool is_bfloat16, MatmulKind kind);
inline constexpr int kColumnsPerBlock = 64;
inline constexpr int kSm90LinesOfOut = 16;
inline constexpr int kNumSm90TileCounters = 1 << 16;

// `copied`: both operands are aligned and of 16 bits, which is faster.
MatmulKernel SixteenBitMatmulKernel(bool is_bfloat16, MatmulKind kind, bool copied);

// What follows kForwardTransposed where no kernel has kActivationGradient: sm_90's has.
MatmulKernel ActivationGradientKernelOf(ElementType type);
#endif

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_MATMUL_KERNELS_H_
