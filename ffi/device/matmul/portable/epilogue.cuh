// Loads, stores and the activation epilogue of the portable kernels, one element at a time.
#ifndef JAX_EP_DEVICE_MATMUL_PORTABLE_EPILOGUE_CUH_
#define JAX_EP_DEVICE_MATMUL_PORTABLE_EPILOGUE_CUH_

#include "ffi/device/matmul/activation.cuh"
#include "ffi/device/ptx/element_types.cuh"

namespace jax_ep::portable {

template <typename T>
inline constexpr bool kIsFloat32 = T::kPerWord == 1;

template <typename T>
__device__ inline float LoadElement(const void* from, int64_t index) {
  float values[2];
  if constexpr (kIsFloat32<T>) return static_cast<const float*>(from)[index];
  T::Unpack(static_cast<const uint16_t*>(from)[index], values);
  return values[0];
}

// Rounds the value to T, stores it, and returns it. For 16-bit types a null `to` only rounds.
template <typename T>
__device__ inline float StoreElement(void* to, int64_t index, float value) {
  if constexpr (kIsFloat32<T>) {
    static_cast<float*>(to)[index] = value;
    return value;
  }
  float values[2] = {value, 0};
  const uint32_t word = T::Pack(values);
  if (to != nullptr) static_cast<uint16_t*>(to)[index] = static_cast<uint16_t>(word);
  T::Unpack(word, values);
  return values[0];
}

// Stores one element of kActivation's results from the accumulators of its gate and up columns.
// `up` is ignored if the activation is not gated.
template <typename T>
__device__ void StoreActivation(const MatmulParams& params, int group, int64_t row, int column,
                                float gate, float up) {
  const EpilogueParams& epilogue = params.epilogue;
  const ActivationFunction& f = epilogue.activation;
  const int64_t columns = params.shape_n;
  const int64_t pre_columns = f.is_gated ? 2 * columns : columns;
  const auto pre_activation = [&](float accumulator, int64_t pre_column) {
    if (epilogue.bias != nullptr) accumulator += epilogue.bias[group * pre_columns + pre_column];
    const int64_t index = row * pre_columns + pre_column;
    if (kIsFloat32<T> && epilogue.pre_activation == nullptr) return accumulator;
    if (f.is_identity) return accumulator;
    return StoreElement<T>(epilogue.pre_activation, index, accumulator);
  };
  gate = pre_activation(gate, column);
  float value = f.is_identity ? gate : Activate(f, gate).value;
  if (f.is_gated) value *= pre_activation(up, columns + column);
  if (epilogue.row_weights != nullptr) value *= epilogue.row_weights[row];
  StoreElement<T>(params.out, row * columns + column, value);
}

}  // namespace jax_ep::portable

#endif  // JAX_EP_DEVICE_MATMUL_PORTABLE_EPILOGUE_CUH_
