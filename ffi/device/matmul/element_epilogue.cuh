// Activations of single sums: what kernels do that are not made for speed.
#ifndef JAX_EP_DEVICE_MATMUL_ELEMENT_EPILOGUE_CUH_
#define JAX_EP_DEVICE_MATMUL_ELEMENT_EPILOGUE_CUH_

#include "ffi/device/matmul/activation.cuh"
#include "ffi/device/ptx/element_types.cuh"

namespace jax_ep {

template <typename T>
inline constexpr bool kIsFloat32 = T::kPerWord == 1;

template <typename T>
__device__ inline float LoadElement(const void* from, int64_t at) {
  float values[2];
  if constexpr (kIsFloat32<T>) return static_cast<const float*>(from)[at];
  T::Unpack(static_cast<const uint16_t*>(from)[at], values);
  return values[0];
}

// Returns what was stored.
template <typename T>
__device__ inline float StoreElement(void* to, int64_t at, float value) {
  if constexpr (kIsFloat32<T>) {
    static_cast<float*>(to)[at] = value;
    return value;
  }
  float values[2] = {value, 0};
  const uint32_t word = T::Pack(values);
  if (to != nullptr) static_cast<uint16_t*>(to)[at] = static_cast<uint16_t>(word);
  T::Unpack(word, values);
  return values[0];
}

// kActivation for column n of the result: the sums of the gate and of what it multiplies, or one.
template <typename T>
__device__ void StoreActivated(const MatmulProblem& problem, int group, int64_t row, int n,
                               float gate, float up) {
  const EpilogueParams& epilogue = problem.epilogue;
  const ActivationFunction& f = epilogue.activation;
  const int64_t columns = problem.num_n;
  const int64_t pitch = f.is_gated ? 2 * columns : columns;
  const auto finish = [&](float sum, int64_t column) {
    if (epilogue.bias != nullptr) sum += epilogue.bias[group * pitch + column];
    const int64_t at = row * pitch + column;
    if (kIsFloat32<T> && epilogue.pre_activation == nullptr) return sum;
    if (f.is_identity) return sum;
    return StoreElement<T>(epilogue.pre_activation, at, sum);
  };
  gate = finish(gate, n);
  float value = f.is_identity ? gate : Activate(f, gate).value;
  if (f.is_gated) value *= finish(up, columns + n);
  if (epilogue.row_weights != nullptr) value *= epilogue.row_weights[row];
  StoreElement<T>(problem.out, row * columns + n, value);
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_MATMUL_ELEMENT_EPILOGUE_CUH_
