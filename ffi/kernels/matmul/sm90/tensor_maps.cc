#include "ffi/kernels/matmul/sm90/tensor_maps.h"

#include "ffi/runtime/driver.h"

namespace jax_ep {

Status MakeTensorMap(const MappedTensor& tensor, const BoxShape& box, CUtensorMap* map) {
  static decltype(&cuTensorMapEncodeTiled) encode = nullptr;
  static const Status found = FindDriverFunction("cuTensorMapEncodeTiled", 12000, &encode);
  if (!found.ok()) return found;
  const ElementType type = tensor.type;
  const int64_t element_bytes = ElementBytes(type);
  constexpr int64_t kLineBytes = 128;
  const int64_t line = kLineBytes / element_bytes;
  // Boxes of one block begin at any column, others at a block.
  const bool is_blocked = box.blocks > 1;
  if (is_blocked && tensor.columns % line != 0) {
    return FailedPrecondition("a box of ", box.blocks, " blocks of rows of ", tensor.columns,
                              " columns");
  }
  const auto size = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  // Row kPrefixRows - n of prefix i is row i - n of the matrix, and at its address if the last
  // coordinate is kPrefixRows: addresses have 64 bits, and 2^30 times 2^34 bytes are once around.
  const int64_t row_bytes = tensor.row_pitch * element_bytes;
  const int64_t round_bytes = (int64_t{1} << 34) - row_bytes;
  static_assert(kPrefixRows == 1 << 30);
  const cuuint64_t sizes[] = {size(is_blocked ? line : tensor.columns), size(tensor.rows),
                              size(is_blocked ? tensor.columns / line : 1), size(tensor.depth),
                              size(tensor.is_prefixes ? kPrefixRows + 1 : 1)};
  const cuuint64_t strides[] = {size(row_bytes), size(kLineBytes),
                                size(tensor.matrix_pitch * element_bytes), size(round_bytes)};
  const cuuint32_t box_sizes[] = {static_cast<cuuint32_t>(line), static_cast<cuuint32_t>(box.lines),
                                  static_cast<cuuint32_t>(box.blocks), 1, 1};
  const cuuint32_t steps[] = {1, 1, 1, 1, 1};
  const CUresult error =
      encode(map,
             type == kF32    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
             : type == kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                             : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
             5, const_cast<void*>(tensor.base), sizes, strides, box_sizes, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error == CUDA_SUCCESS) return {};
  return FailedPrecondition("cuTensorMapEncodeTiled failed with error ", static_cast<int>(error));
}

}  // namespace jax_ep
