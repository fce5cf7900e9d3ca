// The kernel that quantizes gradients of gated activations.
#ifndef JAX_EP_KERNELS_QUANTIZE_ACTIVATION_GRADIENT_KERNELS_H_
#define JAX_EP_KERNELS_QUANTIZE_ACTIVATION_GRADIENT_KERNELS_H_

namespace jax_ep {

inline constexpr int kActivationGradientThreads = 256;
// Three vectors for each of eight rows, per thread.
inline constexpr int kActivationGradientSharedBytes = 3 * 8 * 16 * kActivationGradientThreads;

const void* ActivationGradientKernelAddress();

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_QUANTIZE_ACTIVATION_GRADIENT_KERNELS_H_
