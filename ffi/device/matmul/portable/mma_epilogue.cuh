// Epilogues of mma.sync's accumulators, in pairs of adjacent elements.
#ifndef JAX_EP_DEVICE_MATMUL_PORTABLE_MMA_EPILOGUE_CUH_
#define JAX_EP_DEVICE_MATMUL_PORTABLE_MMA_EPILOGUE_CUH_

#include "ffi/device/matmul/portable/epilogue.cuh"
#include "ffi/device/matmul/portable/mma_tile.cuh"

namespace jax_ep::portable {

// Calls function(index, count, values) for each pair of adjacent elements of this thread: the index
// of the first in `out`, how many of them lie in the result (perhaps 0 or less), their
// accumulators.
template <typename Function>
__device__ void ForEachPair(const MatmulParams& params, const Tile& tile, int warp_m, int warp_n,
                            Accumulators& accumulators, const Function& function) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2 * kFragmentsM; ++i) {
    const int m = warp_m + 8 * i + lane / 4;
    if (m >= tile.num_m) break;
#pragma unroll
    for (int j = 0; j < 2 * kFragmentsN; ++j) {
      const int n = warp_n + 8 * j + lane % 4 * 2;
      function(tile.out + int64_t{m} * params.shape_n + n, tile.num_n - n,
               &accumulators[i / 2][j][i % 2 * 2]);
    }
  }
}

// Adds the first `count` of two adjacent elements of the result to `values`.
__device__ inline void AddPair(const MatmulParams& params, int64_t index, int count,
                               float* values) {
  if (count <= 0) return;
  const float* const from = static_cast<const float*>(params.out) + index;
  if (params.out_is_aligned) {
    const float2 pair = *reinterpret_cast<const float2*>(from);
    values[0] += pair.x, values[1] += pair.y;
  } else {
    values[0] += from[0];
    if (count > 1) values[1] += from[1];
  }
}

// Stores the first `count` of two adjacent elements; the first has an even column in its tile.
template <typename T>
__device__ void StorePair(const MatmulParams& params, int64_t index, int count,
                          const float* values) {
  if (count <= 0) return;
  if (params.out_is_float32) {
    float* const to = static_cast<float*>(params.out) + index;
    if (params.out_is_aligned) {
      *reinterpret_cast<float2*>(to) = make_float2(values[0], values[1]);
    } else {
      to[0] = values[0];
      if (count > 1) to[1] = values[1];
    }
  } else {
    uint16_t* const to = static_cast<uint16_t*>(params.out) + index;
    const uint32_t word = T::Pack(values);
    if (params.out_is_aligned) {
      *reinterpret_cast<uint32_t*>(to) = word;
    } else {
      to[0] = static_cast<uint16_t>(word);
      if (count > 1) to[1] = static_cast<uint16_t>(word >> 16);
    }
  }
}

template <typename T, MatmulKind kKind>
__device__ void StoreEpilogue(const MatmulParams& params, const Tile& tile, int warp_m, int warp_n,
                              Accumulators& accumulators) {
  // All loads come before the first store: the compiler would not move them across one.
  if (kIsRhsGradient<kKind> && params.accumulates) {
    ForEachPair(
        params, tile, warp_m, warp_n, accumulators,
        [&](int64_t index, int count, float* values) { AddPair(params, index, count, values); });
  }
  ForEachPair(params, tile, warp_m, warp_n, accumulators,
              [&](int64_t index, int count, const float* values) {
                StorePair<T>(params, index, count, values);
              });
}

// The interleaving of TileColumns gives a lane the accumulators of both gate and up.
template <typename T>
__device__ void ActivationEpilogue(const MatmulParams& params, const Tile& tile, int warp_m,
                                   int warp_n, const Accumulators& accumulators) {
  const int lane = threadIdx.x % 32;
  const bool is_gated = params.epilogue.activation.is_gated;
#pragma unroll
  for (int i = 0; i < 2 * kFragmentsM; ++i) {
    const int m = warp_m + 8 * i + lane / 4;
    if (m >= tile.num_m) break;
#pragma unroll
    for (int j = 0; j < 2 * kFragmentsN; ++j) {
      if (is_gated && j >= kFragmentsN) break;
      const float* const gate = &accumulators[i / 2][j][i % 2 * 2];
      const float* const up =
          &accumulators[i / 2][(j + kFragmentsN) % (2 * kFragmentsN)][i % 2 * 2];
      const int n = (is_gated ? warp_n / 2 : warp_n) + 8 * j + lane % 4 * 2;
      for (int x = 0; x < min(2, tile.num_n - n); ++x) {
        StoreActivation<T>(params, tile.group, tile.row + m, tile.column + n + x, gate[x], up[x]);
      }
    }
  }
}

}  // namespace jax_ep::portable

#endif  // JAX_EP_DEVICE_MATMUL_PORTABLE_MMA_EPILOGUE_CUH_
