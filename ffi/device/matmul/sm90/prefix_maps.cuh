// Coordinates in prefix maps, see tensor_maps.h.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_PREFIX_MAPS_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_PREFIX_MAPS_CUH_

#include "ffi/device/matmul/sm90/tensor_maps.h"
#include "ffi/device/ptx/tma.cuh"

namespace jax_ep::sm90 {

// Returns the box that begins at `row` and `column` of the matrix and stops before row `end`; it is
// empty if `row` is not below `end`. In maps whose boxes have several column blocks, `column_block`
// is the first one's index and `column` is 0.
__device__ inline TmaCoordinates PrefixCoordinates(int end, int column, int row,
                                                   int column_block = 0) {
  return {column, kPrefixRows - (end - row), column_block, end, kPrefixRows};
}

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_PREFIX_MAPS_CUH_
