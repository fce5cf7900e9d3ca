#include "ffi/kernels/matmul/sm90/make_tensor_map.h"

#include "ffi/kernels/matmul/sm90/kernels.h"
#include "ffi/runtime/cuda/driver.h"

namespace jax_ep {

constexpr int kTmaAlignment = 16;  // bytes

Status CheckTmaAddress(const char* name, const void* address) {
  if (reinterpret_cast<uintptr_t>(address) % kTmaAlignment == 0) return {};
  return FailedPrecondition(name, " begins at an address that is no multiple of ", kTmaAlignment,
                            "; TMA needs that. Copy the array first");
}

// Returns the swizzle of boxes whose lines have so many bytes.
static CUtensorMapSwizzle SwizzleOf(int64_t bytes) {
  return bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
         : bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                       : CU_TENSOR_MAP_SWIZZLE_NONE;
}

// The dimensions of a map, innermost first, are the members of TmaCoordinates: column, row, column
// block, matrix, and the one that corrects the addresses of prefixes.
Status MakeTensorMap(const MappedTensor& tensor, const BoxShape& box, CUtensorMap* map) {
  static decltype(&cuTensorMapEncodeTiled) encode = nullptr;
  static const Status found = FindDriverFunction("cuTensorMapEncodeTiled", 12000, &encode);
  if (!found.ok()) return found;
  const ElementType type = tensor.type;
  const int64_t element_bytes = ElementBytes(type);
  constexpr int64_t kColumnBlockBytes = 128;
  const int64_t block_columns = kColumnBlockBytes / element_bytes;
  // A box of one column block may begin at any column, a larger one at a multiple of a block only.
  const bool is_blocked = box.column_blocks > 1;
  if (is_blocked && tensor.columns % block_columns != 0) {
    return FailedPrecondition("a box of ", box.column_blocks, " column blocks needs rows of whole ",
                              "blocks; these have ", tensor.columns, " columns");
  }
  const auto size = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  const int64_t row_bytes = tensor.row_stride * element_bytes;
  const int64_t correction_bytes = (int64_t{1} << 34) - row_bytes;
  static_assert(kPrefixRows == 1 << 30, "kPrefixRows * 2^34 bytes are once around the addresses");
  const cuuint64_t sizes[] = {size(is_blocked ? block_columns : tensor.columns), size(tensor.rows),
                              size(is_blocked ? tensor.columns / block_columns : 1),
                              size(tensor.num_matrices),
                              size(tensor.is_prefixes ? kPrefixRows + 1 : 1)};
  const cuuint64_t strides[] = {size(row_bytes), size(kColumnBlockBytes),
                                size(tensor.matrix_stride * element_bytes), size(correction_bytes)};
  const int64_t box_columns = box.columns > 0 ? box.columns : block_columns;
  const cuuint32_t box_sizes[] = {static_cast<cuuint32_t>(box_columns),
                                  static_cast<cuuint32_t>(box.rows),
                                  static_cast<cuuint32_t>(box.column_blocks), 1, 1};
  const cuuint32_t element_strides[] = {1, 1, 1, 1, 1};
  const CUresult error = encode(
      map,
      type == kF32    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
      : type == kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                      : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      5, const_cast<void*>(tensor.base), sizes, strides, box_sizes, element_strides,
      CU_TENSOR_MAP_INTERLEAVE_NONE, SwizzleOf(box_columns * element_bytes),
      box.is_narrow ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error == CUDA_SUCCESS) return {};
  return FailedPrecondition("cuTensorMapEncodeTiled failed with error ", static_cast<int>(error));
}

Status MapPreActivation(const MatmulParams& params, ElementType type, MatmulTensorMaps* maps) {
  const void* const pre_activation = params.epilogue.pre_activation;
  if (pre_activation == nullptr) return {};
  const int64_t columns = params.shape_n;
  const int64_t halves = params.epilogue.activation.is_gated ? 2 : 1;
  for (int64_t half = 0; half < halves; ++half) {
    const void* const first =
        static_cast<const char*>(pre_activation) + half * columns * ElementBytes(type);
    Status status = MakeTensorMap(
        MappedTensor::Prefixes(first, type, columns, halves * columns, params.groups.num_rows),
        {kSm90OutBoxRows}, &maps->pre_activation[half]);
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace jax_ep
