// Coordinates of boxes in prefix maps (tensor_maps.h), whose copies stop where a group's rows end.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_PREFIX_MAPS_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_PREFIX_MAPS_CUH_

#include "ffi/device/matmul/sm90/tensor_map.h"
#include "ffi/device/ptx/tma.cuh"

namespace jax_ep {

// In a map of prefixes (tensor_maps.h): row `row` and those that follow it, but none from `end` on.
__device__ inline TmaCoordinates RowsUntil(int end, int column, int row, int block = 0) {
  return {column, kPrefixRows - (end - row), block, end, kPrefixRows};
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_MATMUL_SM90_PREFIX_MAPS_CUH_
