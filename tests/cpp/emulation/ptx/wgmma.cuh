// Replaces ffi/device/ptx/wgmma.cuh. Each thread computes its own elements, when it commits their
// group or when it waits for it. The first shows operands that are read before they have arrived,
// the second those that are overwritten too soon.
#ifndef JAX_EP_DEVICE_PTX_WGMMA_CUH_
#define JAX_EP_DEVICE_PTX_WGMMA_CUH_

#include "ffi/device/ptx/element_types.cuh"
#include "ffi/device/ptx/wgmma_operand.cuh"
#include "tests/cpp/emulation/ptx/shared_memory.cuh"
#include "tests/cpp/emulation/ptx/thread_groups.h"

namespace jax_ep {

struct EmulatedMmas : EmulatedGroups {
  static EmulatedMmas& OfThread() { return EmulatedOfThread<EmulatedMmas>(); }
};

inline void WgmmaFence() {}
inline void WgmmaCommitGroup() {
  EmulatedMmas& mmas = EmulatedMmas::OfThread();
  mmas.Commit();
  if (emulation::Random() % 2 == 0) mmas.Run(0);
}
// Some threads wait long, so that others overtake them.
template <int kPending>
void WgmmaWaitGroup() {
  EmulatedMmas& mmas = EmulatedMmas::OfThread();
  if (mmas.groups.size() > kPending && emulation::Random() % 64 == 0) {
    for (uint64_t turns = emulation::Random() % 64; turns > 0; --turns) emulation::Yield();
  }
  mmas.Run(kPending);
}

template <int kCount>
void FenceAccumulators(float (&)[kCount]) {}

// The operand that a descriptor describes: 16 elements along k of each row, or column, `mn`.
template <typename T, MajorMode kMajor>
struct EmulatedOperand {
  const uint8_t* shared;
  uint32_t descriptor;

  void Read(uint32_t mn, float (&values)[16]) const {
    const uint32_t begin = (descriptor & 0x3fff) << 4;
    const uint32_t block_bytes = descriptor >> 16 << 4;
    for (uint32_t k = 0; k < 16; ++k) {
      const uint32_t address = kMajor == MajorMode::kMajorK
                                   ? begin + mn * 128 + k * 2
                                   : begin + mn / 64 * block_bytes + k * 128 + mn % 64 * 2;
      uint16_t element;
      std::memcpy(&element, shared + (address ^ (address >> 7 & 7) << 4), 2);
      float pair[2];
      T::Unpack(element, pair);
      values[k] = pair[0];
    }
  }
};

// Issues an MMA of 64 rows, 16 k and some columns.
template <typename T, MajorMode kMajorA, MajorMode kMajorB>
void EmulatedWgmma(float* accumulators, uint32_t a, uint32_t b, bool accumulate, int columns) {
  const uint8_t* const shared = emulation::SharedMemory();
  const uint32_t thread = threadIdx.x % 128;
  EmulatedMmas::OfThread().open.push_back([=] {
    const EmulatedOperand<T, kMajorA> left = {shared, a};
    const EmulatedOperand<T, kMajorB> right = {shared, b};
    float rows[2][16];
    for (uint32_t h = 0; h < 2; ++h) {
      left.Read(thread / 32 * 16 + h * 8 + thread % 32 / 4, rows[h]);
    }
    for (int j = 0; j < columns / 8; ++j) {
      for (int i = 0; i < 2; ++i) {
        float column[16];
        right.Read(static_cast<uint32_t>(8 * j + i) + thread % 4 * 2, column);
        for (int h = 0; h < 2; ++h) {
          float& accumulator = accumulators[4 * j + 2 * h + i];
          float sum = 0;
          for (int k = 0; k < 16; ++k) sum += rows[h][k] * column[k];
          accumulator = (accumulate ? accumulator : 0) + sum;
        }
      }
    }
  });
}

template <typename T, MajorMode kMajorA, MajorMode kMajorB>
void Wgmma(float (&accumulators)[128], uint32_t a, uint32_t b, bool accumulate) {
  EmulatedWgmma<T, kMajorA, kMajorB>(accumulators, a, b, accumulate, 256);
}

template <int kCount>
void WarpgroupRegisterAlloc() {}
template <int kCount>
void WarpgroupRegisterDealloc() {}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_WGMMA_CUH_
