// The epilogues of the sm_90 matmul: each takes a consumer warp's 16 x 256 accumulators to memory.
//
// An epilogue works in two parts, so that the tensor cores hardly wait when a tile ends. Store
// takes the accumulators' values, and the next tile may overwrite them. The other work is done in
// slices, between the MMAs of the next tile's k-blocks. Every epilogue has these functions, called
// by whole warps:
//
//   Store        called when a tile ends
//   LoadSlice    called before the MMAs of a k-block are issued: loads the slice's inputs, with a
//                latency that the MMAs hide
//   RunSlice     called while the MMAs of the k-block at k run, once the stage before is released:
//                the loads into that stage need not wait for the slice
//   Finish       called before the next Store: runs the slices that are left
//   Close        called last, after Finish: waits for all stores
//
// accumulators[4 * j + 2 * h + i] of lane l is row 8 * h + l / 4, column 8 * j + 2 * (l % 4) + i,
// as wgmma.cuh says.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_CUH_

#include "ffi/device/matmul/params.h"
#include "ffi/device/matmul/sm90/epilogue_activation_gradient.cuh"
#include "ffi/device/matmul/sm90/epilogue_store.cuh"

namespace jax_ep::sm90 {

template <typename T, MatmulKind kKind>
struct EpilogueSelector {
  using Type = StoreEpilogue<T>;
};
template <typename T>
struct EpilogueSelector<T, MatmulKind::kActivationGradient> {
  using Type = ActivationGradientEpilogue<T>;
};

template <typename T, MatmulKind kKind>
using Epilogue = typename EpilogueSelector<T, kKind>::Type;

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_CUH_
