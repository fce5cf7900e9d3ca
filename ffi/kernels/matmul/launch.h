// Launches a grouped matmul of any kind: asks the kernel families in order.
#ifndef JAX_EP_KERNELS_MATMUL_LAUNCH_H_
#define JAX_EP_KERNELS_MATMUL_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>

#include "ffi/device/matmul/params.h"
#include "ffi/kernels/matmul/call.h"
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

// A size, and the number that the kernels take multiples of.
struct SizeMultiple {
  const char* name;
  int64_t value;
  int64_t multiple;
};

// Checks that sizes are positive multiples. `kernels_take` is as "the FP8 kernels take".
Status CheckMultiples(const char* kernels_take, std::initializer_list<SizeMultiple> sizes);

MatmulOperand MakeOperand(const void* data, ElementType type, int64_t row_stride);
RowGroups MakeRowGroups(const GroupedMatmulSizes& sizes, const int32_t* group_sizes,
                        bool zero_tail);

// Launches on `stream`, by the first family that runs on the device and supports the call.
Status LaunchMatmul(MatmulCall call, cudaStream_t stream);

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_MATMUL_LAUNCH_H_
