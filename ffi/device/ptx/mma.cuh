// Warp-wide matrix instructions of sm_80 and newer on 16-bit elements.
#ifndef JAX_EP_DEVICE_PTX_MMA_CUH_
#define JAX_EP_DEVICE_PTX_MMA_CUH_

#include "ffi/device/ptx/element_types.cuh"

namespace jax_ep {

// Reads four 8x8 matrices from shared memory: lanes 8i to 8i+7 give the addresses of the rows of
// matrix i, 16 bytes each. Lane l gets elements 2*(l%4) and 2*(l%4)+1 of row l/4 of each matrix,
// or, if kTransposed, of column l/4.
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

// The reverse, on sm_90 and newer.
__device__ inline void StMatrix(uint32_t address, const uint32_t (&matrices)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
               : "memory");
}

// sums[16x8] += left[16x16] * right[16x8]. With g = lane / 4 and t = 2 * (lane % 4), a lane holds,
// as pairs of neighbours along the contraction k (left, right) or along n (sums):
//   left   {m=g, k=t}, {m=g+8, k=t}, {m=g, k=t+8}, {m=g+8, k=t+8}
//   right  {k=t, n=g}, {k=t+8, n=g}
//   sums   {m=g, n=t}, {m=g+8, n=t}
template <typename T>
__device__ void Mma(float (&sums)[4], const uint32_t (&left)[4], const uint32_t* right);

#define JAX_EP_MMA(TYPE, NAME)                                                                   \
  template <>                                                                                    \
  __device__ inline void Mma<TYPE>(float (&sums)[4], const uint32_t (&left)[4],                  \
                                   const uint32_t* right) {                                      \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME                                   \
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                   \
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                             \
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1])); \
  }

JAX_EP_MMA(BFloat16, "bf16")
JAX_EP_MMA(Float16, "f16")

#undef JAX_EP_MMA

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_MMA_CUH_
