// Group sizes of emulated grouped matmuls.
#ifndef JAX_EP_TESTS_CPP_EMULATION_MATMUL_MATMUL_SIZES_H_
#define JAX_EP_TESTS_CPP_EMULATION_MATMUL_MATMUL_SIZES_H_

#include <cstdint>
#include <vector>

namespace harness {

// No rows; narrow tiles, which have at most 64; tiles on both sides of 128 rows, the staging
// buffer's, and of 256, the most that a tile has.
inline const std::vector<int32_t> kAllHeights = {0, 1, 64, 65, 136, 257, 300};
// Wide tiles, which have 65 to 128 rows, between narrow and tall ones.
inline const std::vector<int32_t> kSomeRows = {128, 65, 0, 129, 72, 90};
inline const std::vector<int32_t> kFewRows = {17, 0, 48, 1, 64};

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_EMULATION_MATMUL_MATMUL_SIZES_H_
