// A kernel of a grouped matmul, as the launch sees it.
#ifndef JAX_EP_KERNELS_MATMUL_KERNEL_H_
#define JAX_EP_KERNELS_MATMUL_KERNEL_H_

namespace jax_ep {

// A persistent kernel. Every number of blocks gives the same result; one block per SM is fastest.
struct MatmulKernel {
  const void* address;  // null: there is no such kernel
  int threads;
  int cluster_blocks = 1;  // blocks per cluster; the grid is a multiple of it
  int shared_bytes;
  int tile_m;
  int tile_n;
  int store_elements = 1;  // elements that a thread stores at once if MatmulParams::out_is_aligned
};

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_MATMUL_KERNEL_H_
