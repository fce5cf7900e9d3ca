// Transposes a block of 128 x 128 quantized values through registers and shared memory.
//
// Each thread has a few columns of eight rows. It transposes them in registers, and shared memory
// joins them to whole rows of the transpose.
#ifndef JAX_EP_DEVICE_QUANTIZE_TRANSPOSE_BLOCK_CUH_
#define JAX_EP_DEVICE_QUANTIZE_TRANSPOSE_BLOCK_CUH_

#include "ffi/device/common/transpose_bytes.cuh"
#include "ffi/device/ptx/vectors.cuh"
#include "ffi/device/quantize/scale_params.h"

namespace jax_ep::transpose {

inline constexpr int kBlock = kValuesPerScale;
inline constexpr int kThreadRows = 8;
inline constexpr int kChunkBytes = 8;  // eight rows of a transposed column
inline constexpr int kChunksPerRow = kBlock / kChunkBytes;
inline constexpr int kVectorsPerTransposedRow = kBlock / static_cast<int>(sizeof(uint4));
inline constexpr int kTransposedVectors = kBlock * kVectorsPerTransposedRow;

template <typename Type>
inline constexpr int kVectorsPerBlockRow = kBlock / kPerVector<Type>;

template <typename Type>
inline constexpr int kThreads = kBlock / kThreadRows * kVectorsPerBlockRow<Type>;

// Words of eight-bit values per vector of x.
template <typename Type>
inline constexpr int kWords = kPerVector<Type> / 4;

// The thread's rows are a chunk of this index; and its first column in the block.
template <typename Type>
__device__ int ThreadChunk() {
  return static_cast<int>(threadIdx.x) / kVectorsPerBlockRow<Type>;
}
template <typename Type>
__device__ int ThreadColumn() {
  return static_cast<int>(threadIdx.x) % kVectorsPerBlockRow<Type> * kPerVector<Type>;
}

// Returns where shared memory has a chunk of a transposed row. The exclusive or spreads the chunks
// that a half warp writes at once over all banks.
template <typename Type>
__device__ int ChunkIndex(int column, int chunk) {
  return column * kChunksPerRow + (chunk ^ column / kPerVector<Type> % kChunksPerRow);
}

// Writes the thread's eight rows into `tile`, transposed.
template <typename Type>
__device__ void StoreChunks(uint2* tile, const uint32_t (&words)[kThreadRows][kWords<Type>]) {
  const int chunk = ThreadChunk<Type>();
  const int first_column = ThreadColumn<Type>();
#pragma unroll
  for (int w = 0; w < kWords<Type>; ++w) {
    uint32_t low[4] = {words[0][w], words[1][w], words[2][w], words[3][w]};
    uint32_t high[4] = {words[4][w], words[5][w], words[6][w], words[7][w]};
    TransposeBytes(low);
    TransposeBytes(high);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      tile[ChunkIndex<Type>(first_column + 4 * w + i, chunk)] = make_uint2(low[i], high[i]);
    }
  }
}

// Returns 16 bytes of transposed row `column`, from `chunk` on, which is even.
template <typename Type>
__device__ uint4 LoadChunks(const uint2* tile, int column, int chunk) {
  // Both chunks are in one vector of 16 bytes, in the order of their index.
  const int index = ChunkIndex<Type>(column, chunk);
  uint4 loaded = reinterpret_cast<const uint4*>(tile)[index / 2];
  if (index % 2 == 1) loaded = make_uint4(loaded.z, loaded.w, loaded.x, loaded.y);
  return loaded;
}

}  // namespace jax_ep::transpose

#endif  // JAX_EP_DEVICE_QUANTIZE_TRANSPOSE_BLOCK_CUH_
