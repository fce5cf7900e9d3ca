// A tile of a 16-bit matrix in shared memory: filled from global memory by all threads of a block,
// read by warps as the fragments of tensor core instructions.
#ifndef JAX_EP_DEVICE_MATMUL_OPERAND_TILE_CUH_
#define JAX_EP_DEVICE_MATMUL_OPERAND_TILE_CUH_

#include "ffi/device/common/vectors.cuh"
#include "ffi/device/matmul/problem.h"
#include "ffi/device/ptx/cp_async.cuh"
#include "ffi/device/ptx/mma.cuh"
#include "ffi/device/ptx/shared_memory.cuh"

namespace jax_ep {

// Eight elements in 16 bits each. Those from `count` on are not read and become zeros.
template <typename T>
__device__ inline uint4 ReadChunk(const uint16_t* from, int count) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = 2 * i < count ? from[2 * i] : 0;
    const uint32_t high = 2 * i + 1 < count ? from[2 * i + 1] : 0;
    words[i] = low | high << 16;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

template <typename T>
__device__ inline uint4 ReadChunk(const float* from, int count) {
  float values[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = i < count ? from[i] : 0;
  return PackVector<T>(values);
}

// The same for aligned rows, whose numbers of elements are multiples of 4.
template <typename T>
__device__ inline uint4 ReadChunk(const float4* from, int count) {
  const float4 none = make_float4(0, 0, 0, 0);
  const float4 low = count > 0 ? from[0] : none;
  const float4 high = count > 4 ? from[1] : none;
  const float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  return PackVector<T>(values);
}

// Which elements of a line a tile takes: neighbours, or 32 of a gate and then the 32 that it
// multiplies, which are `up` further, and so on.
struct TileColumns {
  int count;  // of the matrix, from the tile's first on; of the gate, if there is one
  int up;     // 0: neighbours

  __device__ int Place(int element) const {
    return up == 0 ? element : element / 64 * 32 + element % 32;
  }
  __device__ int Offset(int element) const {
    return Place(element) + (element % 64 >= 32 ? up : 0);
  }
  __device__ int Left(int element) const { return count - Place(element); }
};

// kLines lines of kElements elements, which are neighbours in global memory too, or in TileColumns.
template <int kLines, int kElements, int kThreads>
struct OperandTile {
  static constexpr int kBytes = kLines * kElements * 2;

  // Elements of 16 bytes: what a lane copies, and a row of a matrix of LdMatrix.
  static constexpr int kChunk = 8;
  static constexpr int kChunksOfLine = kElements / kChunk;
  static constexpr int kChunksOfThread = kLines * kChunksOfLine / kThreads;
  static_assert(kLines * kChunksOfLine == kChunksOfThread * kThreads, "threads have equal shares");
  static_assert(kThreads % kChunksOfLine == 0, "a thread has the same chunk of all its lines");
  static_assert(kLines % 16 == 0 && kElements % 16 == 0, "fragments are 16 x 16");

  // Where a chunk is, in bytes. Shared memory serves 128 bytes at once, 16 from each of 8 columns.
  // LdMatrix reads the same chunk of 8 lines that follow on a multiple of 8, so these must fall
  // into 8 columns. Lines of 128 bytes or more all begin in the same column, which the XOR with the
  // line makes different; with 64 bytes every second line does. Copies write neighbouring chunks,
  // which are in different columns in either case.
  __device__ static int Offset(int line, int chunk) {
    static_assert(kChunksOfLine == 4 || kChunksOfLine % 8 == 0, "the columns are 4 or 8");
    const int column = chunk ^ (kChunksOfLine == 4 ? line / 2 % 4 : line % 8);
    return (line * kChunksOfLine + column) * 16;
  }

  // Fills the tile with the matrix from element `from` on. What is not in `lines` x `elements`,
  // which may be negative, is not read and becomes zeros. Complete after CpAsyncCommitGroup,
  // CpAsyncWaitGroup and a barrier. kCopied: the matrix is known to be aligned and of 16 bits.
  template <typename T, bool kCopied, bool kMayBeFloat32>
  __device__ static void Fill(uint32_t tile, const MatmulOperand& matrix, int64_t from, int lines,
                              TileColumns columns) {
    if (kMayBeFloat32 && !kCopied && matrix.is_float32) {
      const float* const data = static_cast<const float*>(matrix.data) + from;
      if (matrix.is_aligned) {
        Store<T, float4>(tile, data, matrix.pitch, lines, columns);
      } else {
        Store<T, float>(tile, data, matrix.pitch, lines, columns);
      }
    } else {
      const uint16_t* const data = static_cast<const uint16_t*>(matrix.data) + from;
      if (kCopied || matrix.is_aligned) {
        Copy(tile, data, matrix.pitch, lines, columns);
      } else {
        Store<T, uint16_t>(tile, data, matrix.pitch, lines, columns);
      }
    }
  }

  // Reads a 16x16 fragment, whose first element is the given line's and chunk's, as four 8x8
  // matrices: the first; the next along the lines or, if !kLinesFirst, along the elements; the next
  // in the other direction; and the last.
  template <bool kTransposed, bool kLinesFirst>
  __device__ static void LoadFragment(uint32_t tile, int line, int chunk, uint32_t (&matrices)[4]) {
    const int lane = threadIdx.x % 32;
    const int second = lane / 8 % 2;
    const int third = lane / 16;
    line += lane % 8 + 8 * (kLinesFirst ? second : third);
    chunk += kLinesFirst ? third : second;
    LdMatrix<kTransposed>(tile + Offset(line, chunk), matrices);
  }

 private:
  static constexpr int kLinesAtOnce = kThreads / kChunksOfLine;

  // Aligned rows end at a multiple of a chunk, so a chunk is all in or all out.
  __device__ static void Copy(uint32_t tile, const uint16_t* from, int64_t pitch, int lines,
                              TileColumns columns) {
    const int chunk = threadIdx.x % kChunksOfLine;
    from += columns.Offset(chunk * kChunk);
    const bool is_there = columns.Left(chunk * kChunk) > 0;
#pragma unroll
    for (int i = 0; i < kChunksOfThread; ++i) {
      const int line = threadIdx.x / kChunksOfLine + i * kLinesAtOnce;
      CpAsync<16>(tile + Offset(line, chunk), from + line * pitch, line < lines && is_there);
    }
  }

  // Reads all before it stores, because what it reads may be far.
  template <typename T, typename Source, typename Element>
  __device__ static void Store(uint32_t tile, const Element* from, int64_t pitch, int lines,
                               TileColumns columns) {
    const int chunk = threadIdx.x % kChunksOfLine;
    from += columns.Offset(chunk * kChunk);
    const int count = columns.Left(chunk * kChunk);
    uint4 chunks[kChunksOfThread];
#pragma unroll
    for (int i = 0; i < kChunksOfThread; ++i) {
      const int line = threadIdx.x / kChunksOfLine + i * kLinesAtOnce;
      chunks[i] = ReadChunk<T>(reinterpret_cast<const Source*>(from + line * pitch),
                               line < lines ? count : 0);
    }
#pragma unroll
    for (int i = 0; i < kChunksOfThread; ++i) {
      const int line = threadIdx.x / kChunksOfLine + i * kLinesAtOnce;
      StoreShared(tile + Offset(line, chunk), chunks[i]);
    }
  }
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_MATMUL_OPERAND_TILE_CUH_
