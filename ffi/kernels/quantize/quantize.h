// Launches the kernel that quantizes rows.
#ifndef JAX_EP_KERNELS_QUANTIZE_QUANTIZE_H_
#define JAX_EP_KERNELS_QUANTIZE_QUANTIZE_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/kernels/quantize/kernels.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

struct Quantize {
  QuantizeKind kind;
  ElementType type;  // x has it
  int64_t num_rows;
  int64_t columns;
  float min_amax;
  bool power_of_two_scales;
  const void* x;    // [num_rows, columns]
  uint8_t* values;  // [num_rows, columns]
  float* scales;    // [num_rows, scales per row]
};

// Loads the kernels on the current device, see LoadMatmulKernels.
Status LoadQuantizeKernels();

// Checks whether the kernels support the sizes. Called when XLA compiles a call, and by the launch.
Status CheckQuantizeLaunch(int64_t num_rows, int64_t columns);

// Quantizes on `stream`.
Status LaunchQuantize(const Quantize& call, cudaStream_t stream);

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_QUANTIZE_QUANTIZE_H_
