// Epilogue of kRhsGradient (sm_90): one warp stores 16 x 256 accumulators, in 16 bits or in
// float32. epilogue.cuh says when its functions are called.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_RHS_GRADIENT_STORE_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_RHS_GRADIENT_STORE_CUH_

#include "ffi/device/matmul/params.h"
#include "ffi/device/matmul/sm90/epilogue/staging.cuh"
#include "ffi/device/matmul/sm90/tensor_maps.h"
#include "ffi/device/ptx/element_types.cuh"
#include "ffi/device/ptx/tma.cuh"

namespace jax_ep::sm90 {

template <typename T>
class RhsGradientEpilogue {
 public:
  __device__ RhsGradientEpilogue(const MatmulTensorMaps& maps, uint32_t staging)
      : map_(&maps.out), staging_(staging) {}

  __device__ void Store(const MatmulParams& params, const EpilogueCoordinates& at,
                        const float (&accumulators)[kAccumulators]) {
    const TmaCoordinates box = {at.n, at.m, 0, at.group};
    if (params.out_is_float32) {
      // All columns at once, which leaves nothing for slices. Every element is in one tile only, so
      // the sum that TMA adds does not depend on an order.
      staging_.StoreFloat32(map_, box, accumulators, params.accumulates);
    } else {
      StoreRounded(box, accumulators);
    }
  }

  // Stores the two halves of the columns kStages - 1 k-blocks apart, because the second waits until
  // TMA has read the first.
  __device__ void RunSlice(int k_block) {
    if (k_block == 1 || k_block == kStages) StoreHalf();
  }

  __device__ void Finish() {
    StoreHalf();
    StoreHalf();
    halves_left_ = 0;  // already 0: tells the compiler that kept_ needs no registers from here on
  }

  __device__ void Close() { staging_.WaitUntilComplete(); }

 private:
  // Stages the first half of the columns and keeps the second in registers.
  __device__ void StoreRounded(const TmaCoordinates& box,
                               const float (&accumulators)[kAccumulators]) {
    uint32_t words[kStagingWords];
    PackHalf<T>(accumulators, 0, words);
    staging_.Replace(words);
    PackHalf<T>(accumulators, 1, kept_);
    box_ = box;
    halves_left_ = 2;
  }

  __device__ void StoreHalf() {
    if (halves_left_ == 0) return;
    if (halves_left_ == 1) staging_.Replace(kept_);
    staging_.Store<2>(map_, box_);
    box_.column += kStagingBoxes * kSwizzleBytes / 2;
    --halves_left_;
  }

  const void* const map_;
  const EpilogueStaging<> staging_;
  int halves_left_ = 0;
  TmaCoordinates box_ = {};
  uint32_t kept_[kStagingWords] = {};
};

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_RHS_GRADIENT_STORE_CUH_
