// Tiles of the matmul that decodes with MXFP4 weights (sm_90). For host and device, so that unit
// tests can check them.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_MXFP4_DECODE_TILES_H_
#define JAX_EP_DEVICE_MATMUL_SM90_MXFP4_DECODE_TILES_H_

#include "ffi/device/common/integers.h"

namespace jax_ep {

// A tile has at most kRows rows. Tiles of the same columns follow each other: the later ones find
// the weights in the L2 cache.
struct DecodeTiles {
  static constexpr int32_t kRows = 16;
  static constexpr int32_t kRowUnit = 8;  // rows of an MMA

  int32_t num_m;    // rows of the group's result
  int32_t tiles_n;  // tiles along n

  struct Place {
    int32_t m;  // first row
    int32_t n_tile;
  };

  JAX_EP_HOST_DEVICE int64_t Count() const { return int64_t{tiles_n} * TilesM(); }
  JAX_EP_HOST_DEVICE Place At(int64_t index) const {
    const auto item = static_cast<int32_t>(index);
    return {item % TilesM() * kRows, item / TilesM()};
  }

 private:
  JAX_EP_HOST_DEVICE int32_t TilesM() const { return CeilDivide(num_m, kRows); }
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_MATMUL_SM90_MXFP4_DECODE_TILES_H_
