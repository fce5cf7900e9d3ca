// Row blocks: up to 128 rows of one group each, as quantize_transposed and FP8 weight gradients
// take them.
#ifndef JAX_EP_TESTS_CPP_GPU_QUANTIZE_ROW_BLOCKS_H_
#define JAX_EP_TESTS_CPP_GPU_QUANTIZE_ROW_BLOCKS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

namespace harness {

struct RowBlocks {
  std::vector<int32_t> first_rows, num_rows;  // as many as groups of any sizes need
  std::vector<int32_t> group_sizes;           // rows of the blocks, multiples of 128
  std::vector<int32_t> begins, ends;          // blocks of each group
  int64_t used = 0;                           // blocks with rows

  RowBlocks(const std::vector<int32_t>& sizes, int64_t rows) {
    const int64_t groups = std::min<int64_t>(sizes.size(), rows);
    const int64_t capacity = (rows - groups) / 128 + groups;
    int64_t row = 0;
    for (int32_t size : sizes) {
      const int64_t end = std::min(row + std::max(size, 0), rows);
      begins.push_back(static_cast<int32_t>(used));
      for (; row < end; row = std::min(row + 128, end)) {
        first_rows.push_back(static_cast<int32_t>(row));
        num_rows.push_back(static_cast<int32_t>(std::min<int64_t>(128, end - row)));
        ++used;
      }
      ends.push_back(static_cast<int32_t>(used));
      group_sizes.push_back(128 * (ends.back() - begins.back()));
    }
    first_rows.resize(capacity, static_cast<int32_t>(rows));
    num_rows.resize(capacity, 0);
  }

  int64_t capacity() const { return static_cast<int64_t>(num_rows.size()); }
};

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_QUANTIZE_ROW_BLOCKS_H_
