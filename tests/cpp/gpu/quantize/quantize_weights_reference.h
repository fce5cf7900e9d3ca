// Quantizes matrices in blocks of 128 x 128 by loops over numbers.
#ifndef JAX_EP_TESTS_CPP_GPU_QUANTIZE_QUANTIZE_WEIGHTS_REFERENCE_H_
#define JAX_EP_TESTS_CPP_GPU_QUANTIZE_QUANTIZE_WEIGHTS_REFERENCE_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ffi/kernels/quantize/quantize_weights.h"
#include "tests/cpp/gpu/quantize/quantize_reference.h"

namespace harness {

// Values and scales of a matrix, each row by row.
struct QuantizedMatrix {
  std::vector<uint8_t> values;
  std::vector<float> scales;
};

inline QuantizedMatrix ReferenceMatrix(const jax_ep::QuantizeWeights& call, const float* matrix,
                                       int64_t rows, int64_t columns) {
  static const std::vector<double> magnitudes = Magnitudes(false);
  jax_ep::Quantize as_row{};
  as_row.kind = QuantizeKind::kBlock128;
  as_row.min_amax = call.min_amax;
  as_row.power_of_two_scales = call.power_of_two_scales;
  QuantizedMatrix result;
  result.values.resize(rows * columns);
  for (int64_t row = 0; row < rows; row += 128) {
    for (int64_t column = 0; column < columns; column += 128) {
      std::vector<int64_t> places;
      std::vector<float> block;
      for (int64_t i = row; i < std::min(rows, row + 128); ++i) {
        for (int64_t j = column; j < std::min(columns, column + 128); ++j) {
          places.push_back(i * columns + j);
          block.push_back(matrix[places.back()]);
        }
      }
      const float scale = ReferenceScale(as_row, block.data(), block.size());
      const float factor = 1.0f / scale;
      result.scales.push_back(scale);
      for (size_t i = 0; i < block.size(); ++i) {
        result.values[places[i]] = Encode(magnitudes, block[i] * factor);
      }
    }
  }
  return result;
}

template <typename T>
std::vector<T> Transposed(const std::vector<T>& matrix, int64_t rows, int64_t columns) {
  std::vector<T> result(matrix.size());
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) result[j * rows + i] = matrix[i * columns + j];
  }
  return result;
}

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_QUANTIZE_QUANTIZE_WEIGHTS_REFERENCE_H_
