// The 16-byte chunks of a row as float32 numbers.
#ifndef JAX_EP_DEVICE_COMMON_VECTORS_CUH_
#define JAX_EP_DEVICE_COMMON_VECTORS_CUH_

#include "ffi/device/ptx/element_types.cuh"

namespace jax_ep {

template <typename Type>
inline constexpr int kPerVector = 4 * Type::kPerWord;

template <typename Type>
__device__ inline void UnpackVector(uint4 chunk, float (&values)[kPerVector<Type>]) {
  Type::Unpack(chunk.x, values);
  Type::Unpack(chunk.y, values + Type::kPerWord);
  Type::Unpack(chunk.z, values + 2 * Type::kPerWord);
  Type::Unpack(chunk.w, values + 3 * Type::kPerWord);
}

template <typename Type>
__device__ inline uint4 PackVector(const float (&values)[kPerVector<Type>]) {
  return make_uint4(Type::Pack(values), Type::Pack(values + Type::kPerWord),
                    Type::Pack(values + 2 * Type::kPerWord),
                    Type::Pack(values + 3 * Type::kPerWord));
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_COMMON_VECTORS_CUH_
