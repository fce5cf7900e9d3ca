// What the launches of grouped matmuls share: the choice of a kernel, and the launch.
#ifndef JAX_EP_KERNELS_MATMUL_LAUNCH_H_
#define JAX_EP_KERNELS_MATMUL_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/device/matmul/problem.h"
#include "ffi/runtime/buffers.h"
#include "ffi/runtime/signatures.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

// What the kernels take: sizes and types. rhs may be float32 where lhs is not.
Status CheckMatmulLaunch(int64_t num_sms, const GroupedMatmulSizes& sizes);

// That a type is lhs's or float32.
Status CheckMatmulType(const char* name, ElementType type, ElementType lhs);

MatmulOperand Operand(const void* data, ElementType type, int64_t pitch);
GroupRows Rows(const GroupedMatmulSizes& sizes, const int32_t* group_sizes, bool with_tail);

// `problem` is complete but for what depends on the kernel. num_sms: 0 for all.
Status LaunchMatmul(MatmulKind kind, ElementType type, ElementType out_type, int64_t num_sms,
                    MatmulProblem problem, cudaStream_t stream);

// Loads the kernels on the current device. To be called there once before the first launch, while
// no kernel runs that waits for another GPU: loading code may wait for all of them.
Status LoadMatmulKernels();

// A number for launches: every one that may run while another does, on the same device, has its
// own. Negative once there are no more: slower, and as good.
int32_t NewTileCounter();

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_MATMUL_LAUNCH_H_
