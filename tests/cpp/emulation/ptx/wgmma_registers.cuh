// Replaces ffi/device/ptx/wgmma_registers.cuh.
#ifndef JAX_EP_DEVICE_PTX_WGMMA_REGISTERS_CUH_
#define JAX_EP_DEVICE_PTX_WGMMA_REGISTERS_CUH_

#include <array>

#include "tests/cpp/emulation/ptx/wgmma.cuh"

namespace jax_ep {

inline constexpr int kWgmmaRegisters = 16;

template <int kCount>
void FenceRegisters(uint32_t (&)[kCount]) {}

// Issues the four MMAs of a k-block for 8 * (index + 1) columns, of at most `most`. The lanes of a
// quad have the same rows of a. Fails if a lane changes its words before the MMAs are complete.
inline void EmulatedRegistersKBlock(float* accumulators, const uint32_t (&a)[kWgmmaRegisters],
                                    uint32_t b, bool accumulate, int index, int most) {
  if (index < 0 || index >= most / 8) {
    emulation::Fail("an MMA of " + std::to_string(8 * (index + 1)) + " columns");
  }
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t* const own = a;
  const uint64_t* const lanes = emulation::Exchange(reinterpret_cast<uint64_t>(own));
  std::array<std::array<uint32_t, kWgmmaRegisters>, 4> words;
  for (uint32_t i = 0; i < 4; ++i) {
    std::memcpy(words[i].data(), reinterpret_cast<const void*>(lanes[lane / 4 * 4 + i]),
                sizeof words[i]);
  }
  const uint8_t* const shared = emulation::SharedMemory();
  EmulatedMmas::OfThread().open.push_back([=] {
    if (std::memcmp(own, words[lane % 4].data(), sizeof words[0]) != 0) {
      emulation::Fail("registers of an MMA change while it runs");
    }
    for (int j = 0; j <= index; ++j) {
      for (int i = 0; i < 2; ++i) {
        const auto column = static_cast<uint32_t>(8 * j + i) + lane % 4 * 2;
        float sums[2] = {};
        for (uint32_t step = 0; step < 4; ++step) {
          float values[16];
          EmulatedOperand<BFloat16, MajorMode::kMajorK>{shared, b + step * 2}.Read(column, values);
          for (uint32_t k = 0; k < 16; ++k) {
            for (uint32_t h = 0; h < 2; ++h) {
              float pair[2];
              BFloat16::Unpack(words[k % 8 / 2][4 * step + 2 * (k / 8) + h], pair);
              sums[h] += pair[k % 2] * values[k];
            }
          }
        }
        for (int h = 0; h < 2; ++h) {
          float& accumulator = accumulators[4 * j + 2 * h + i];
          accumulator = (accumulate ? accumulator : 0) + sums[h];
        }
      }
    }
  });
  WgmmaCommitGroup();
}

inline void WgmmaRegistersAnyColumns(float (&accumulators)[128],
                                     const uint32_t (&a)[kWgmmaRegisters], uint32_t b,
                                     bool accumulate, int index) {
  EmulatedRegistersKBlock(accumulators, a, b, accumulate, index, 256);
}
inline void WgmmaRegistersFewColumns(float (&accumulators)[128],
                                     const uint32_t (&a)[kWgmmaRegisters], uint32_t b,
                                     bool accumulate, int index) {
  EmulatedRegistersKBlock(accumulators, a, b, accumulate, index, 64);
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_WGMMA_REGISTERS_CUH_
