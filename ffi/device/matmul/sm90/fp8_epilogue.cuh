// Store epilogue of the sm_90 FP8 matmul: one warp stores 16 x 256 sums, one half after the other.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_FP8_EPILOGUE_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_FP8_EPILOGUE_CUH_

#include "ffi/device/matmul/params.h"
#include "ffi/device/matmul/sm90/epilogue_staging.cuh"
#include "ffi/device/matmul/sm90/fp8_scales.cuh"
#include "ffi/device/matmul/sm90/tensor_maps.h"
#include "ffi/device/ptx/element_types.cuh"
#include "ffi/device/ptx/tma.cuh"

namespace jax_ep::sm90 {

// Two sets of accumulators leave no registers for results that wait. So the second half stays in
// its sums until the first MMAs of the next tile run, which go to the first half.
template <typename Scales>
class Fp8Epilogue {
 public:
  __device__ Fp8Epilogue(const MatmulParams& params, const Fp8Scales& scales,
                         const MatmulTensorMaps& maps, uint32_t staging)
      : params_(params), scales_(scales), map_(&maps.out), staging_(staging) {}

  // Called when a tile ends. Stores the first half and clears it. Scales of a tile's sums are
  // applied to both halves here, where the registers of the products are free.
  __device__ void StoreFirst(const EpilogueCoordinates& at, bool is_zero,
                             float (&sums)[kHalves][kHalfAccumulators]) {
    if (!is_zero) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        Scales::Apply(scales_, params_, at, half, sums[half]);
      }
    }
    at_ = at;
    StoreHalf(0, sums[0]);
    has_second_ = true;
  }

  // Called before anything is added to the second half, and at the end.
  __device__ void StoreSecond(float (&sums)[kHalfAccumulators]) {
    if (!has_second_) return;
    StoreHalf(1, sums);
    has_second_ = false;
  }

  __device__ void Close() { staging_.WaitUntilComplete(); }

 private:
  __device__ void StoreHalf(int half, float (&sums)[kHalfAccumulators]) {
    TmaCoordinates box = PrefixBox(at_);
    box.column += half * kHalfN;
    if (params_.out_is_float32) {
      staging_.StoreFloat32(map_, box, sums, false);
    } else {
      uint32_t words[kStagingWords];
#pragma unroll
      for (int i = 0; i < kStagingWords; ++i) words[i] = BFloat16::Pack(sums + 2 * i);
      staging_.Replace(words);
      staging_.Store<2>(map_, box);
    }
#pragma unroll
    for (float& sum : sums) sum = 0;
  }

  const MatmulParams& params_;
  const Fp8Scales& scales_;
  const void* const map_;
  const EpilogueStaging staging_;
  EpilogueCoordinates at_ = {};
  bool has_second_ = false;
};

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_FP8_EPILOGUE_CUH_
