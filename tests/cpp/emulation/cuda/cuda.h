// The part of the CUDA driver that the matmuls use: it encodes tensor maps.
#ifndef JAX_EP_TESTS_CPP_EMULATION_CUDA_CUDA_H_
#define JAX_EP_TESTS_CPP_EMULATION_CUDA_CUDA_H_

#include <cstdint>

using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;

enum CUresult { CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE };
enum CUtensorMapDataType {
  CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
  CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
  CU_TENSOR_MAP_DATA_TYPE_FLOAT16
};
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle {
  CU_TENSOR_MAP_SWIZZLE_NONE,
  CU_TENSOR_MAP_SWIZZLE_64B,
  CU_TENSOR_MAP_SWIZZLE_128B
};
enum CUtensorMapL2promotion {
  CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
  CU_TENSOR_MAP_L2_PROMOTION_L2_256B
};
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

// Dimensions are ordered innermost first; the innermost one's stride is an element.
struct alignas(64) CUtensorMap {
  uint64_t base;
  uint64_t strides[5];  // bytes
  uint64_t sizes[5];
  uint16_t box[5];
  uint16_t element_bytes;
  uint16_t swizzle_bytes;
};
static_assert(sizeof(CUtensorMap) == 128);

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                void* base, const cuuint64_t* sizes, const cuuint64_t* strides,
                                const cuuint32_t* box, const cuuint32_t* element_strides,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill);

#endif  // JAX_EP_TESTS_CPP_EMULATION_CUDA_CUDA_H_
