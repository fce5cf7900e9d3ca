// Makes tensor maps.
#ifndef JAX_EP_KERNELS_MATMUL_SM90_TENSOR_MAPS_H_
#define JAX_EP_KERNELS_MATMUL_SM90_TENSOR_MAPS_H_

#include <cstdint>

#include "ffi/device/matmul/sm90/tensor_map.h"
#include "ffi/runtime/buffers.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

// A stack of matrices. The base, and the bytes from row to row and from matrix to matrix, are
// multiples of 16.
struct MappedTensor {
  const void* base;
  ElementType type;
  int64_t columns;
  int64_t rows;
  int64_t depth;
  int64_t row_pitch;  // elements from row to row
  int64_t matrix_pitch;
  bool is_prefixes = false;

  // Row-major, one after another.
  static MappedTensor Stack(const void* base, ElementType type, int64_t columns, int64_t rows,
                            int64_t depth) {
    return {base, type, columns, rows, depth, columns, columns * rows};
  }

  // Of one matrix: matrix i of the stack is its first i rows, and row kPrefixRows - 1 there the
  // last of them. So copies of boxes stop at row i, wherever that is.
  static MappedTensor Prefixes(const void* base, ElementType type, int64_t columns,
                               int64_t row_pitch, int64_t rows) {
    return {base, type, columns, kPrefixRows, rows + 1, row_pitch, row_pitch, true};
  }
};

// Blocks of 128 bytes x `lines`, in shared memory with a swizzle of 128 bytes.
struct BoxShape {
  int lines;
  int blocks = 1;  // side by side; of more than one, rows are multiples of 128 bytes
};

Status MakeTensorMap(const MappedTensor& tensor, const BoxShape& box, CUtensorMap* map);

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_MATMUL_SM90_TENSOR_MAPS_H_
