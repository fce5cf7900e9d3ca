// Conversion between 16-byte vectors of row elements and float32 values.
#ifndef JAX_EP_DEVICE_PTX_VECTORS_CUH_
#define JAX_EP_DEVICE_PTX_VECTORS_CUH_

#include "ffi/device/ptx/element_types.cuh"

namespace jax_ep {

// Elements per 16-byte vector.
template <typename Type>
inline constexpr int kPerVector = 4 * Type::kPerWord;

template <typename Type>
__device__ inline void UnpackVector(uint4 vector, float (&values)[kPerVector<Type>]) {
  Type::Unpack(vector.x, values);
  Type::Unpack(vector.y, values + Type::kPerWord);
  Type::Unpack(vector.z, values + 2 * Type::kPerWord);
  Type::Unpack(vector.w, values + 3 * Type::kPerWord);
}

template <typename Type>
__device__ inline uint4 PackVector(const float (&values)[kPerVector<Type>]) {
  return make_uint4(Type::Pack(values), Type::Pack(values + Type::kPerWord),
                    Type::Pack(values + 2 * Type::kPerWord),
                    Type::Pack(values + 3 * Type::kPerWord));
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_VECTORS_CUH_
