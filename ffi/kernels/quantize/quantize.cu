// Quantizes rows to eight bits, in one pass over memory, for sm_80 and newer.
//
// A block takes a row. Its threads hold a tile of the row in registers, find the largest magnitude
// of each scale's values by shuffles, and round. A row with one scale that is longer than a tile is
// read twice; the second time from L2.
#include "ffi/device/ptx/eight_bit_types.cuh"
#include "ffi/device/ptx/memory.cuh"
#include "ffi/device/ptx/vectors.cuh"
#include "ffi/device/quantize/elements.cuh"
#include "ffi/device/quantize/scale.cuh"
#include "ffi/kernels/quantize/kernels.h"

namespace jax_ep {
namespace {

// A tile: vector i of a thread is the row's vector i * blockDim.x + threadIdx.x.
struct Tile {
  uint4 vectors[kQuantizeVectors];
};

// Elements past the row's end are zeros.
template <typename Type>
__device__ uint4 LoadVector(const QuantizeParams& params, int64_t row, int vector) {
  const int column = vector * kPerVector<Type>;
  const int64_t first = row * params.columns + column;
  if (params.is_aligned && column < params.columns) {
    return LoadGlobalNoAllocate(static_cast<const uint4*>(params.x) + first / kPerVector<Type>);
  }
  return LoadElements<Type>(params.x, first, params.columns - column);
}

template <typename Type>
__device__ Tile LoadTile(const QuantizeParams& params, int64_t row, int tile) {
  Tile loaded;
#pragma unroll
  for (int i = 0; i < kQuantizeVectors; ++i) {
    const int vector = (tile * kQuantizeVectors + i) * blockDim.x + threadIdx.x;
    loaded.vectors[i] = LoadVector<Type>(params, row, vector);
  }
  return loaded;
}

template <typename Type, typename Value>
__device__ void StoreVector(const QuantizeParams& params, int64_t row, int vector, uint4 x,
                            float factor) {
  constexpr int kWords = kPerVector<Type> / 4;
  const int column = vector * kPerVector<Type>;
  if (column >= params.columns) return;
  float values[kPerVector<Type>];
  UnpackVector<Type>(x, values);
  uint32_t words[kWords];
#pragma unroll
  for (float& value : values) value = __fmul_rn(value, factor);
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = Value::Pack(values + 4 * i);
  uint8_t* const out = params.values + row * params.columns + column;
  if (!params.is_aligned) {
    StoreBytes(out, words, Min(kPerVector<Type>, params.columns - column));
  } else if constexpr (kWords == 2) {
    *reinterpret_cast<uint2*>(out) = make_uint2(words[0], words[1]);
  } else {
    *reinterpret_cast<uint32_t*>(out) = words[0];
  }
}

}  // namespace

template <typename Type, typename Value, bool kHasBlocks>
__global__ void __launch_bounds__(kMaxQuantizeThreads)
    QuantizeKernel(const __grid_constant__ QuantizeParams params) {
  constexpr int kLanesPerScale = kValuesPerScale / kPerVector<Type>;
  const int64_t row = blockIdx.x;
  const int num_vectors = CeilDivide(params.columns, kPerVector<Type>);
  const int num_tiles = CeilDivide(num_vectors, kQuantizeVectors * static_cast<int>(blockDim.x));
  const int num_scales = kHasBlocks ? CeilDivide(params.columns, kValuesPerScale) : 1;
  float* const scales = params.scales + row * num_scales;
  Tile tile = LoadTile<Type>(params, row, 0);
  float factor = 0;
  if constexpr (!kHasBlocks) {
    uint32_t amax = 0;
    for (int index = 0;; ++index) {
      const Tile next = index == 0 ? tile : LoadTile<Type>(params, row, index);
#pragma unroll
      for (const uint4& vector : next.vectors) amax = max(amax, AmaxBits<Type>(vector));
      if (index + 1 == num_tiles) break;
    }
    const float scale = ScaleOf(params.scale, AmaxOfBlock<kMaxQuantizeThreads>(amax));
    factor = __frcp_rn(scale);
    if (threadIdx.x == 0) scales[0] = scale;
  }
  for (int index = 0; index < num_tiles; ++index) {
    if (index > 0) tile = LoadTile<Type>(params, row, index);
#pragma unroll
    for (int i = 0; i < kQuantizeVectors; ++i) {
      const int vector = (index * kQuantizeVectors + i) * blockDim.x + threadIdx.x;
      if constexpr (kHasBlocks) {
        const uint32_t amax = AmaxOfLanes<kLanesPerScale>(AmaxBits<Type>(tile.vectors[i]));
        const float scale = ScaleOf(params.scale, amax);
        factor = __frcp_rn(scale);
        if (vector % kLanesPerScale == 0 && vector < num_vectors) {
          scales[vector / kLanesPerScale] = scale;
        }
      }
      StoreVector<Type, Value>(params, row, vector, tile.vectors[i], factor);
    }
  }
}

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // NVRTC compiles the device code only

namespace jax_ep {
namespace {

template <typename Type>
const void* KernelOf(QuantizeKind kind) {
  switch (kind) {
    case QuantizeKind::kBlock128:
      return reinterpret_cast<const void*>(QuantizeKernel<Type, E4M3, true>);
    case QuantizeKind::kRow:
      return reinterpret_cast<const void*>(QuantizeKernel<Type, E4M3, false>);
    case QuantizeKind::kRowE5M2:
      return reinterpret_cast<const void*>(QuantizeKernel<Type, E5M2, false>);
  }
  return nullptr;
}

}  // namespace

const void* QuantizeKernelAddress(ElementType type, QuantizeKind kind) {
  return type == kF32    ? KernelOf<Float32>(kind)
         : type == kBF16 ? KernelOf<BFloat16>(kind)
                         : KernelOf<Float16>(kind);
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
