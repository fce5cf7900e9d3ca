// Row weights of activation epilogues (sm_90).
#ifndef JAX_EP_DEVICE_MATMUL_SM90_ROW_WEIGHTS_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_ROW_WEIGHTS_CUH_

#include "ffi/device/matmul/sm90/epilogue_staging.cuh"

namespace jax_ep::sm90 {

// The weights of the two rows that a lane has accumulators of.
struct RowWeights {
  float values[2];

  __device__ void Load(const float* weights, const EpilogueCoordinates& at) {
    for (int half = 0; half < 2; ++half) {
      const int m = threadIdx.x % 32 / 4 + 8 * half;
      values[half] = weights != nullptr && m < at.num_m ? weights[at.m + m] : 1.0f;
    }
  }
};

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_ROW_WEIGHTS_CUH_
