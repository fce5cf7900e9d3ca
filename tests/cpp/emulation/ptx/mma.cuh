// Replaces ffi/device/ptx/mma.cuh.
#ifndef JAX_EP_DEVICE_PTX_MMA_CUH_
#define JAX_EP_DEVICE_PTX_MMA_CUH_

#include "ffi/device/ptx/element_types.cuh"
#include "tests/cpp/emulation/ptx/shared_memory.cuh"

namespace jax_ep {

// The two elements of a matrix that this lane has: element `i` is in row `row`, column `column`.
struct EmulatedMatrixElement {
  unsigned row, column;

  EmulatedMatrixElement(bool is_transposed, int i) {
    const unsigned lane = threadIdx.x % 32;
    row = lane / 4;
    column = 2 * (lane % 4) + static_cast<unsigned>(i);
    if (is_transposed) std::swap(row, column);
  }
  // `rows`: the addresses of the rows of all matrices.
  uint8_t* In(int matrix, const uint64_t* rows) const {
    return SharedPointer(static_cast<uint32_t>(rows[8 * matrix + row]) + 2 * column);
  }
};

template <bool kTransposed>
void LdMatrix(uint32_t address, uint32_t (&matrices)[4]) {
  const uint64_t* const rows = emulation::Exchange(address);
  for (int matrix = 0; matrix < 4; ++matrix) {
    uint16_t elements[2];
    for (int i = 0; i < 2; ++i) {
      std::memcpy(&elements[i], EmulatedMatrixElement(kTransposed, i).In(matrix, rows), 2);
    }
    matrices[matrix] = uint32_t{elements[1]} << 16 | elements[0];
  }
}

template <bool kTransposed>
void EmulatedStMatrix(uint32_t address, const uint32_t (&matrices)[4]) {
  const uint64_t* const rows = emulation::Exchange(address);
  for (int matrix = 0; matrix < 4; ++matrix) {
    for (int i = 0; i < 2; ++i) {
      const auto element = static_cast<uint16_t>(matrices[matrix] >> 16 * i);
      std::memcpy(EmulatedMatrixElement(kTransposed, i).In(matrix, rows), &element, 2);
    }
  }
}
inline void StMatrix(uint32_t address, const uint32_t (&matrices)[4]) {
  EmulatedStMatrix<false>(address, matrices);
}
inline void StMatrixTransposed(uint32_t address, const uint32_t (&matrices)[4]) {
  EmulatedStMatrix<true>(address, matrices);
}

// Adds products in the order of k.
template <typename T>
void Mma(float (&accumulators)[4], const uint32_t (&a)[4], const uint32_t* b) {
  const unsigned lane = threadIdx.x % 32;
  float rows[2][16];     // from a: lane / 4 and 8 further
  float columns[2][16];  // from b: lane % 4 * 2 and the next
  const auto take = [](const uint64_t* all, unsigned from, int word, float* values) {
    T::Unpack(static_cast<uint32_t>(all[from] >> 32 * word), values);
  };
  for (int half = 0; half < 2; ++half) {  // along k
    const uint64_t* all = emulation::Exchange(uint64_t{a[2 * half + 1]} << 32 | a[2 * half]);
    for (unsigned i = 0; i < 4; ++i) {
      take(all, lane / 4 * 4 + i, 0, &rows[0][8 * half + 2 * i]);
      take(all, lane / 4 * 4 + i, 1, &rows[1][8 * half + 2 * i]);
    }
  }
  const uint64_t* const all = emulation::Exchange(uint64_t{b[1]} << 32 | b[0]);
  for (unsigned i = 0; i < 4; ++i) {
    for (unsigned column = 0; column < 2; ++column) {
      const unsigned from = (lane % 4 * 2 + column) * 4 + i;
      take(all, from, 0, &columns[column][2 * i]);
      take(all, from, 1, &columns[column][8 + 2 * i]);
    }
  }
  for (int i = 0; i < 4; ++i) {
    for (int k = 0; k < 16; ++k) accumulators[i] += rows[i / 2][k] * columns[i % 2][k];
  }
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_MMA_CUH_
