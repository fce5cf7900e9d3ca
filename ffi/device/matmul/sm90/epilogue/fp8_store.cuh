// Store epilogue of the sm_90 FP8 matmul: one warp stores 16 x 256 sums, one half after the other.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_FP8_STORE_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_FP8_STORE_CUH_

#include "ffi/device/matmul/params.h"
#include "ffi/device/matmul/sm90/epilogue/fp8_scales.cuh"
#include "ffi/device/matmul/sm90/epilogue/staging.cuh"
#include "ffi/device/matmul/sm90/tensor_maps.h"
#include "ffi/device/ptx/element_types.cuh"
#include "ffi/device/ptx/tma.cuh"

namespace jax_ep::sm90 {

// Two sets of accumulators leave no registers for results that wait. So the second half stays in
// its sums until the first MMAs of the next tile run, which go to the first half. The first half is
// stored when the tile ends or, if tiles are short, during its last MMAs.
template <typename Scales, bool kIsShort>
class Fp8Epilogue {
 public:
  static constexpr int kConsumerRegisters = kIsShort ? 232 : 224;
  static constexpr bool kReadsAhead = kIsShort;

  __device__ Fp8Epilogue(const MatmulParams& params, const Fp8Scales& scales,
                         const MatmulTensorMaps& maps, uint32_t staging)
      : params_(params), scales_(scales), map_(&maps.out), staging_(staging) {}

  // Called before StoreFirst: loads what StoreFirst and StoreSecond need.
  __device__ void Load(const EpilogueCoordinates& at) {
    at_ = at;
    factors_ = Scales::LoadHalf(scales_, params_, at);
  }

  // Called when the sums of the first half are complete. Stores and clears them.
  __device__ void StoreFirst(float (&sums)[kHalfAccumulators]) {
    StoreHalf(sums);
    at_.n += kHalfN;
    has_second_ = true;
    factors_ = Scales::LoadHalf(scales_, params_, at_);
  }

  // Called before anything is added to the second half, and at the end.
  __device__ void StoreSecond(float (&sums)[kHalves][kHalfAccumulators]) {
    if (!has_second_) return;
    StoreHalf(sums[1]);
    has_second_ = false;
  }

  __device__ void Close() { staging_.WaitUntilComplete(); }

 private:
  __device__ void StoreHalf(float (&sums)[kHalfAccumulators]) {
    Scales::Apply(factors_, sums);
    // Every element of a gradient is in one tile only, so the sum that TMA adds does not depend on
    // an order.
    constexpr bool kIsGradient = Scales::kContractsRows;
    const TmaCoordinates box =
        kIsGradient ? TmaCoordinates{at_.n, at_.m, 0, at_.group} : PrefixBox(at_);
    if (params_.out_is_float32) {
      staging_.StoreFloat32(map_, box, sums, kIsGradient && params_.accumulates);
    } else {
      staging_.ReplaceRounded<BFloat16>(sums);
      staging_.Store<2>(map_, box);
    }
#pragma unroll
    for (float& sum : sums) sum = 0;
  }

  const MatmulParams& params_;
  const Fp8Scales& scales_;
  const void* const map_;
  const EpilogueStaging<> staging_;
  EpilogueCoordinates at_ = {};
  bool has_second_ = false;
  typename Scales::HalfFactors factors_ = {};
};

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_FP8_STORE_CUH_
