// Warp-level matrix instructions on 16-bit elements (sm_80).
#ifndef JAX_EP_DEVICE_PTX_MMA_CUH_
#define JAX_EP_DEVICE_PTX_MMA_CUH_

#include "ffi/device/ptx/element_types.cuh"

namespace jax_ep {

// Loads four 8x8 matrices from shared memory. Lanes 8i to 8i+7 pass the addresses of the rows of
// matrix i, 16 bytes each. Lane l receives elements 2*(l%4) and 2*(l%4)+1 of row l/4 of each
// matrix, or of column l/4 if kTransposed.
template <bool kTransposed>
__device__ inline void LdMatrix(uint32_t address, uint32_t (&matrices)[4]) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(address)
                 : "memory");
  }
}

// Stores four 8x8 matrices, in the layout of LdMatrix (sm_90).
__device__ inline void StMatrix(uint32_t address, const uint32_t (&matrices)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
               : "memory");
}

// The same for the transposes of the matrices.
__device__ inline void StMatrixTransposed(uint32_t address, const uint32_t (&matrices)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
      : "memory");
}

// accumulators[16x8] += a[16x16] * b[16x8]. With g = lane / 4 and t = 2 * (lane % 4), a lane holds
// pairs of neighbors along k (a, b) or along n (accumulators):
//   a             {m=g, k=t}, {m=g+8, k=t}, {m=g, k=t+8}, {m=g+8, k=t+8}
//   b             {k=t, n=g}, {k=t+8, n=g}
//   accumulators  {m=g, n=t}, {m=g+8, n=t}
template <typename T>
__device__ void Mma(float (&accumulators)[4], const uint32_t (&a)[4], const uint32_t* b);

#define JAX_EP_MMA(TYPE, NAME)                                                       \
  template <>                                                                        \
  __device__ inline void Mma<TYPE>(float (&accumulators)[4], const uint32_t (&a)[4], \
                                   const uint32_t* b) {                              \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME                       \
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"       \
        : "+f"(accumulators[0]), "+f"(accumulators[1]), "+f"(accumulators[2]),       \
          "+f"(accumulators[3])                                                      \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));         \
  }

JAX_EP_MMA(BFloat16, "bf16")
JAX_EP_MMA(Float16, "f16")

#undef JAX_EP_MMA

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_MMA_CUH_
