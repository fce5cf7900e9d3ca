// The epilogues of the sm_90 matmuls of 16-bit operands: each takes the accumulators of a consumer
// warp to memory.
//
// An epilogue works in two parts, so that the tensor cores hardly wait when a tile ends. Store
// takes the accumulators' values, and the next tile may overwrite them. The other work is done in
// slices, between the MMAs of the next tile's k-blocks. An epilogue has these functions, or those
// of them that it needs, called by whole warps:
//
//   BeginTile    called when a tile begins: begins copies that its Store waits for
//   Store        called when a tile ends
//   LoadSlice    called before the MMAs of a k-block are issued: loads the slice's inputs, with a
//                latency that the MMAs hide
//   RunSlice     called while the MMAs of a k-block run, once the stage before is released: the
//                loads into that stage need not wait for the slice
//   Finish       called before the next Store: runs the slices that are left
//   Close        called last, after Finish: waits for all stores
//
// accumulators[4 * j + 2 * h + i] of lane l is row 8 * h + l / 4, column 8 * j + 2 * (l % 4) + i,
// as wgmma.cuh says; with swapped operands that is the column and the row of the result.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_EPILOGUE_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_EPILOGUE_CUH_

#include "ffi/device/matmul/sm90/tensor_maps.h"
#include "ffi/device/ptx/tma.cuh"

namespace jax_ep::sm90 {

// The place of one warp's rows in the result.
struct EpilogueCoordinates {
  int32_t group;
  int32_t m;                        // first row; for kRhsGradient, within the group's matrix
  int32_t n;                        // first column
  int32_t num_m;                    // valid rows from m on; may exceed kWarpM, and may be 0 or less
  int32_t second_half_columns = 0;  // columns from a wide tile's first half to its second, or 0
};

// Returns the box in a prefix map, which keeps the warp from storing to the next group's rows.
__device__ inline TmaCoordinates PrefixBox(const EpilogueCoordinates& at) {
  return PrefixCoordinates(at.m + at.num_m, at.n, at.m);
}

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_EPILOGUE_CUH_
