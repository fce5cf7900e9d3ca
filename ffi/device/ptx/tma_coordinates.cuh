// Where a box of a tensor map lies (sm_90). For the emulator, too.
#ifndef JAX_EP_DEVICE_PTX_TMA_COORDINATES_CUH_
#define JAX_EP_DEVICE_PTX_TMA_COORDINATES_CUH_

namespace jax_ep {

// The first element of a box; `column` is innermost. In maps whose boxes hold several blocks of
// columns side by side, `block` is the index of the first one, else 0.
struct TmaCoordinates {
  int column;
  int row;
  int block;
  int matrix;
  int round = 0;  // kPrefixRows in a prefix map, which moves addresses back by as many rows
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_TMA_COORDINATES_CUH_
