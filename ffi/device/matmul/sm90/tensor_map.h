// A tensor map: how the copy engine of sm_90 finds boxes of a matrix.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_TENSOR_MAP_H_
#define JAX_EP_DEVICE_MATMUL_SM90_TENSOR_MAP_H_

#ifdef __CUDACC_RTC__  // has no headers of the toolkit
struct alignas(64) CUtensorMap {
  unsigned long long opaque[16];
};
#else
#include <cuda.h>
#endif

namespace jax_ep {

// Of a prefix, whose last row is number kPrefixRows - 1 (tensor_maps.h): no matrix has more.
inline constexpr int kPrefixRows = 1 << 30;

// Of the operands and results of sm_90's matmul.
struct MatmulTensorMaps {
  CUtensorMap left;
  CUtensorMap right;
  CUtensorMap out;
  CUtensorMap
      pre_activation[2];  // if they are kept: the gate's columns, and those that it multiplies
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_MATMUL_SM90_TENSOR_MAP_H_
