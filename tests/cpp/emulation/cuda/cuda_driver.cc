// The emulated CUDA driver: see cuda.h.
#include <string_view>

#include "cuda.h"
#include "ffi/runtime/cuda/driver.h"

// Refuses what the driver's documentation rules out.
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                void* base, const cuuint64_t* sizes, const cuuint64_t* strides,
                                const cuuint32_t* box, const cuuint32_t* /*element_strides*/,
                                CUtensorMapInterleave /*interleave*/, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion /*promotion*/,
                                CUtensorMapFloatOOBfill /*fill*/) {
  constexpr cuuint64_t kMaxStride = cuuint64_t{1} << 40;
  constexpr cuuint64_t kMaxSize = cuuint64_t{1} << 32;
  constexpr cuuint32_t kMaxBox = 256;
  *map = {};
  map->base = reinterpret_cast<uint64_t>(base);
  map->element_bytes = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
  const bool swizzles = swizzle != CU_TENSOR_MAP_SWIZZLE_NONE;
  map->swizzle_bytes = !swizzles ? 16 : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64 : 128;
  bool is_valid = rank == 5 && map->base % 16 == 0;
  for (cuuint32_t i = 0; is_valid && i < rank; ++i) {
    map->strides[i] = i == 0 ? map->element_bytes : strides[i - 1];
    map->sizes[i] = sizes[i];
    map->box[i] = static_cast<uint16_t>(box[i]);
    is_valid = sizes[i] > 0 && sizes[i] <= kMaxSize && box[i] > 0 && box[i] <= kMaxBox &&
               (i == 0 || (map->strides[i] % 16 == 0 && map->strides[i] < kMaxStride));
  }
  const int box_bytes = map->box[0] * map->element_bytes;
  is_valid = is_valid && box_bytes % 16 == 0 && (!swizzles || box_bytes <= map->swizzle_bytes);
  return is_valid ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

namespace jax_ep {

Status FindDriverFunction(const char* name, unsigned /*version*/, void** function) {
  const bool is_known = std::string_view(name) == "cuTensorMapEncodeTiled";
  *function = is_known ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled) : nullptr;
  return is_known ? Status{} : FailedPrecondition("the emulated driver has no ", name);
}

}  // namespace jax_ep
