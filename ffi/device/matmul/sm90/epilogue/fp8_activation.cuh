// Activation epilogue of the sm_90 FP8 matmul: one warp quantizes 16 x 128 activations.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_FP8_ACTIVATION_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_FP8_ACTIVATION_CUH_

#include "ffi/device/matmul/activation.cuh"
#include "ffi/device/matmul/params.h"
#include "ffi/device/matmul/sm90/epilogue/fp8_scales.cuh"
#include "ffi/device/matmul/sm90/epilogue/row_weights.cuh"
#include "ffi/device/matmul/sm90/epilogue/staging.cuh"
#include "ffi/device/matmul/sm90/tensor_maps.h"
#include "ffi/device/ptx/eight_bit_types.cuh"
#include "ffi/device/ptx/element_types.cuh"
#include "ffi/device/ptx/math.cuh"
#include "ffi/device/ptx/tma.cuh"

namespace jax_ep::sm90 {

// A tile has 128 gate columns and the 128 up columns that they multiply. Each row of it has one
// scale. The gate is complete one MMA before up, so a part of it is activated during a tile's last
// MMAs, and the rest during the first MMAs of the next tile.
class Fp8ActivationEpilogue {
 public:
  static constexpr int kConsumerRegisters = 240;
  static constexpr bool kReadsAhead = true;

  __device__ Fp8ActivationEpilogue(const MatmulParams& params, const Fp8Scales& scales,
                                   const MatmulTensorMaps& maps, uint32_t staging)
      : epilogue_(params.epilogue), scales_(scales), maps_(maps), staging_(staging) {}

  // Called in a tile's last k-block.
  __device__ void Load(const EpilogueCoordinates& at) { at_ = at; }

  // Called when the gate is complete.
  __device__ void StoreFirst(float (&gate)[kHalfAccumulators]) {
    if (epilogue_.pre_activation != nullptr) StorePreActivation(0, gate);
    Activate<0, kEarly>(gate);
    has_results_ = true;
  }

  // Called before anything is added to the sums, and at the end. Stores and clears them.
  __device__ void StoreSecond(float (&sums)[kHalves][kHalfAccumulators]) {
    if (!has_results_) return;
    RowWeights weights;
    weights.Load(epilogue_.row_weights, at_);
    if (epilogue_.pre_activation != nullptr) StorePreActivation(1, sums[1]);
    Activate<kEarly, kHalfAccumulators>(sums[0]);
    float amax[2] = {};
#pragma unroll
    for (int i = 0; i < kHalfAccumulators; ++i) {
      sums[1][i] *= sums[0][i];
      amax[i / 2 % 2] = MaxNan(amax[i / 2 % 2], fabsf(sums[1][i]));
      sums[0][i] = 0;
    }
    StoreQuantized(weights, amax, sums[1]);
    has_results_ = false;
  }

  __device__ void Close() { staging_.WaitUntilComplete(); }

 private:
  static constexpr int kEarly = 32;  // accumulators that StoreFirst activates

  template <int kBegin, int kEnd>
  __device__ void Activate(float (&gate)[kHalfAccumulators]) const {
    if (epilogue_.activation.cubic > kNoCubic) {
      ActivateSmooth<true, kBegin, kEnd>(gate);
    } else {
      ActivateSmooth<false, kBegin, kEnd>(gate);
    }
  }

  // Replaces x by x * sigmoid(u). Two values share a reciprocal, for which exp(-u) is cut off at
  // 2^60.
  template <bool kIsCubic, int kBegin, int kEnd>
  __device__ void ActivateSmooth(float (&gate)[kHalfAccumulators]) const {
    const ActivationFunction& f = epilogue_.activation;
    const auto denominator = [&](float x) {
      const float factor = kIsCubic ? f.exp2_linear + f.exp2_cubic * (x * x) : f.exp2_linear;
      return 1.0f + Exp2Approx(fminf(factor * x, 60.0f));
    };
#pragma unroll
    for (int i = kBegin; i < kEnd; i += 2) {
      const float first = denominator(gate[i]);
      const float second = denominator(gate[i + 1]);
      const float reciprocal = ReciprocalApprox(first * second);
      gate[i] *= reciprocal * second;
      gate[i + 1] *= reciprocal * first;
    }
  }

  __device__ void StorePreActivation(int half, const float (&sums)[kHalfAccumulators]) const {
    staging_.ReplaceRounded<BFloat16>(sums);
    staging_.Store<2>(&maps_.pre_activation[half], PrefixBox(at_));
  }

  // Stores activations times row weights, with a scale for each row, and clears them.
  __device__ void StoreQuantized(const RowWeights& weights, float (&amax)[2],
                                 float (&activations)[kHalfAccumulators]) {
    const int lane = threadIdx.x % 32;
    float factors[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      amax[h] = MaxNan(amax[h], __shfl_xor_sync(0xffffffff, amax[h], 1));
      amax[h] = MaxNan(amax[h], __shfl_xor_sync(0xffffffff, amax[h], 2));
      const float scale = Scale(amax[h] * fabsf(weights.values[h]));
      factors[h] = weights.values[h] * __frcp_rn(scale);
      const int row = lane / 4 + 8 * h;
      if (lane % 4 == h && row < at_.num_m) {
        const int columns = scales_.n_blocks / 2;
        scales_.out[int64_t{at_.m + row} * columns + at_.n / kFp8Block] = scale;
      }
    }
    staging_.WaitUntilRead();
    const uint32_t base = staging_.Vector(lane / 4, 0) + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kHalfAccumulators; i += 2) {
      const int column = i / 4 * 8;
      const uint32_t to = (base ^ column / 16 * 16) + column % 16 + i / 2 % 2 * 8 * kSwizzleBytes;
      StoreShared(to, PackE4M3(activations[i] * factors[i / 2 % 2],
                               activations[i + 1] * factors[i / 2 % 2]));
      activations[i] = 0;
      activations[i + 1] = 0;
    }
    TmaCoordinates box = PrefixBox(at_);
    box.column /= 2;  // two values are one element of the map
    staging_.Store<2>(&maps_.out, box, 1);
  }

  // Returns NaN if the largest magnitude is no finite number.
  __device__ float Scale(float amax) const {
    float scale = fmaxf(amax, kFp8MinAmax) * (1.0f / 448.0f);
    if (scales_.out_is_power_of_two) {
      scale = __int_as_float((__float_as_int(scale) + 0x7fffff) & 0x7f800000);
    }
    return amax <= 3.402823466e+38f ? scale : __int_as_float(0x7fc00000);
  }

  static constexpr float kNoCubic = 1e-30f;

  const EpilogueParams& epilogue_;
  const Fp8Scales& scales_;
  const MatmulTensorMaps& maps_;
  const EpilogueStaging<> staging_;
  EpilogueCoordinates at_ = {};
  bool has_results_ = false;
};

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_FP8_ACTIVATION_CUH_
