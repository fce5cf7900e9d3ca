// Launches a grouped matmul of any kind: chooses the kernel, encodes tensor maps, sizes the grid.
#ifndef JAX_EP_KERNELS_MATMUL_LAUNCH_H_
#define JAX_EP_KERNELS_MATMUL_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/device/matmul/params.h"
#include "ffi/kernels/matmul/kernels.h"
#include "ffi/runtime/calls/buffers.h"
#include "ffi/runtime/calls/signatures.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

// Loads the kernels on the current device. Called there once before the first launch, while no
// kernel runs that waits for another GPU: loading code may wait for all running kernels.
Status LoadMatmulKernels();

// Checks that the kernels support the sizes and lhs's type.
Status CheckMatmulLaunch(int64_t num_sms, const GroupedMatmulSizes& sizes);

// Checks that a type is lhs's or float32.
Status CheckMatmulType(const char* name, ElementType type, ElementType lhs);

MatmulOperand MakeOperand(const void* data, ElementType type, int64_t row_stride);
RowGroups MakeRowGroups(const GroupedMatmulSizes& sizes, const int32_t* group_sizes,
                        bool zero_tail);

// Launches on `stream`. `params` has its operands, shape, groups, epilogue and tile counter; the
// launch fills in the rest. num_sms: 0 for all.
Status LaunchMatmul(MatmulKind kind, ElementType type, ElementType out_type, int64_t num_sms,
                    MatmulParams params, cudaStream_t stream);

// Launches a persistent kernel that computes up to `tiles` tiles. num_sms: 0 for all.
Status LaunchPersistentKernel(const MatmulKernel& kernel, int64_t tiles, int64_t num_sms,
                              void** arguments, cudaStream_t stream);

// Returns an upper bound of the tiles: each group, and the tail, has at most one partial tile along
// m.
int64_t MaxTiles(MatmulKind kind, const MatmulKernel& kernel, const MatmulParams& params);

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_MATMUL_LAUNCH_H_
