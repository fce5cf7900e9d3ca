#include "ffi/kernels/tensor_maps.h"

#include <cuda_runtime_api.h>

#include "ffi/runtime/device_cuda.h"

namespace jax_ep {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// From the driver that is loaded: libcuda is not linked.
Status FindEncode(Encode* encode) {
  static Encode found = nullptr;
  static const cudaError_t error = [] {
    cudaDriverEntryPointQueryResult result;
    return cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled",
                                            reinterpret_cast<void**>(&found), 12000,
                                            cudaEnableDefault, &result);
  }();
  Status status = FromCuda(error, "finding cuTensorMapEncodeTiled");
  if (status.ok() && found == nullptr) {
    return FailedPrecondition("the NVIDIA driver has no cuTensorMapEncodeTiled; update it");
  }
  *encode = found;
  return status;
}

}  // namespace

Status MakeTensorMap(const void* base, ElementType type, int64_t columns, int64_t rows,
                     int64_t depth, int lines, CUtensorMap* map) {
  Encode encode = nullptr;
  if (Status status = FindEncode(&encode); !status.ok()) return status;
  const int64_t element_bytes = ElementBytes(type);
  const auto row_bytes = static_cast<cuuint64_t>(columns * element_bytes);
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows),
                              static_cast<cuuint64_t>(depth)};
  const cuuint64_t strides[] = {row_bytes, row_bytes * static_cast<cuuint64_t>(rows)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(128 / element_bytes),
                            static_cast<cuuint32_t>(lines), 1};
  const cuuint32_t steps[] = {1, 1, 1};
  const CUresult error =
      encode(map,
             type == kF32    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
             : type == kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                             : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
             3, const_cast<void*>(base), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error == CUDA_SUCCESS) return {};
  return FailedPrecondition("cuTensorMapEncodeTiled failed with error ", static_cast<int>(error));
}

}  // namespace jax_ep
