// The scales of the matmul that decodes with MXFP4 weights (sm_90), as TMA loads them.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_MXFP4_DECODE_SCALES_H_
#define JAX_EP_DEVICE_MATMUL_SM90_MXFP4_DECODE_SCALES_H_

#include "ffi/device/matmul/sm90/tensor_maps.h"

namespace jax_ep {

// Scales of a tile's columns follow each other in memory, at any multiple of a word. So the map has
// all of them as one line of words, of which boxes may begin anywhere.
struct DecodeScales {
  static constexpr int kBoxWords = 256;
  static constexpr int kMaxPerColumn = 96;  // shared memory has no space for more

  CUtensorMap map;
  int32_t k_blocks;  // k / kMxFp4Block: scales of a column
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_MATMUL_SM90_MXFP4_DECODE_SCALES_H_
