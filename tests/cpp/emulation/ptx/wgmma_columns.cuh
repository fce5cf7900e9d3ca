// Replaces ffi/device/ptx/wgmma_columns.cuh.
#ifndef JAX_EP_DEVICE_PTX_WGMMA_COLUMNS_CUH_
#define JAX_EP_DEVICE_PTX_WGMMA_COLUMNS_CUH_

#include "tests/cpp/emulation/ptx/wgmma.cuh"

namespace jax_ep {

// Issues the four MMAs of a k-block for 8 * (index + 1) columns, of at most `most`.
template <typename T, MajorMode kMajorA>
void EmulatedKBlock(float* accumulators, uint32_t a, uint32_t b, bool accumulate, int index,
                    int most) {
  if (index < 0 || index >= most / 8) {
    emulation::Fail("an MMA of " + std::to_string(8 * (index + 1)) + " columns");
  }
  constexpr uint32_t kStep = kMajorA == MajorMode::kMajorK ? 2 : 128;
  for (uint32_t i = 0; i < 4; ++i) {
    EmulatedWgmma<T, kMajorA, MajorMode::kMajorK>(accumulators, a + i * kStep, b + i * 2,
                                                  accumulate || i > 0, 8 * (index + 1));
  }
}

template <typename T, MajorMode kMajorA>
void WgmmaAnyColumns(float (&accumulators)[128], uint32_t a, uint32_t b, bool accumulate,
                     int index) {
  EmulatedKBlock<T, kMajorA>(accumulators, a, b, accumulate, index, 256);
  WgmmaCommitGroup();
}

template <typename T, MajorMode kMajorA>
void WgmmaFewColumns(float (&accumulators)[128], uint32_t a, uint32_t b, uint32_t second_a,
                     uint32_t second_b, bool accumulate, int index) {
  EmulatedKBlock<T, kMajorA>(accumulators, a, b, accumulate, index, 64);
  EmulatedKBlock<T, kMajorA>(accumulators, a + second_a, b + second_b, true, index, 64);
  WgmmaCommitGroup();
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_WGMMA_COLUMNS_CUH_
