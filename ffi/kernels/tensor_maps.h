// Makes tensor maps.
#ifndef JAX_EP_KERNELS_TENSOR_MAPS_H_
#define JAX_EP_KERNELS_TENSOR_MAPS_H_

#include <cstdint>

#include "ffi/device/tensor_map.h"
#include "ffi/runtime/buffers.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

// Boxes of 128 bytes x `lines`, for a stack of `depth` row-major matrices that follow each other,
// in shared memory with a swizzle of 128 bytes. The base and the row's bytes are multiples of 16.
Status MakeTensorMap(const void* base, ElementType type, int64_t columns, int64_t rows,
                     int64_t depth, int lines, CUtensorMap* map);

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_TENSOR_MAPS_H_
