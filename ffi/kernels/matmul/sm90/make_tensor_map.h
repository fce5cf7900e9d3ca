// Encodes tensor maps for TMA. ffi/device/matmul/sm90/tensor_maps.h explains prefix maps.
#ifndef JAX_EP_KERNELS_MATMUL_SM90_MAKE_TENSOR_MAP_H_
#define JAX_EP_KERNELS_MATMUL_SM90_MAKE_TENSOR_MAP_H_

#include <cstdint>

#include "ffi/device/matmul/params.h"
#include "ffi/device/matmul/sm90/tensor_maps.h"
#include "ffi/runtime/calls/buffers.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

// A stack of row-major matrices. The base address, and the bytes of both strides, are multiples of
// 16.
struct MappedTensor {
  const void* base;
  ElementType type;
  int64_t columns;
  int64_t rows;
  int64_t num_matrices;
  int64_t row_stride;  // elements
  int64_t matrix_stride;
  bool is_prefixes = false;

  // Returns contiguous matrices, one after another.
  static MappedTensor Stack(const void* base, ElementType type, int64_t columns, int64_t rows,
                            int64_t num_matrices) {
    return {base, type, columns, rows, num_matrices, columns, columns * rows};
  }

  // Returns the prefixes of one matrix: matrix e of the stack is its first e rows.
  static MappedTensor Prefixes(const void* base, ElementType type, int64_t columns,
                               int64_t row_stride, int64_t rows) {
    return {base, type, columns, kPrefixRows, rows + 1, row_stride, row_stride, true};
  }
};

// A box of `rows` rows and `column_blocks` column blocks of 128 bytes. In shared memory the column
// blocks follow each other, with the 128-byte swizzle. If there are several, the matrix's rows must
// be multiples of 128 bytes.
struct BoxShape {
  int rows;
  int column_blocks = 1;
  int columns = 0;  // 64 bytes of columns, with the 64-byte swizzle, or 32 bytes without one;
                    // 0: whole column blocks
  bool is_narrow = false;  // L2 reads what a box of one column block needs, and no more
};

// Checks that TMA can copy from or to an array, whose name the error gives.
Status CheckTmaAddress(const char* name, const void* address);

Status MakeTensorMap(const MappedTensor& tensor, const BoxShape& box, CUtensorMap* map);

// Maps the pre-activation, if it is kept: a row has the gate columns, if there is a gate, then the
// up columns.
Status MapPreActivation(const MatmulParams& params, ElementType type, MatmulTensorMaps* maps);

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_MATMUL_SM90_MAKE_TENSOR_MAP_H_
