// A tensor map: how the copy engine of sm_90 finds boxes of a matrix.
#ifndef JAX_EP_DEVICE_TENSOR_MAP_H_
#define JAX_EP_DEVICE_TENSOR_MAP_H_

#ifdef __CUDACC_RTC__  // has no headers of the toolkit
struct alignas(64) CUtensorMap {
  unsigned long long opaque[16];
};
#else
#include <cuda.h>
#endif

#endif  // JAX_EP_DEVICE_TENSOR_MAP_H_
