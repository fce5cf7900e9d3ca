// A tile of a 16-bit operand in shared memory. All threads of a block fill it from global memory;
// warps read it as fragments for mma.sync.
#ifndef JAX_EP_DEVICE_MATMUL_PORTABLE_OPERAND_TILE_CUH_
#define JAX_EP_DEVICE_MATMUL_PORTABLE_OPERAND_TILE_CUH_

#include "ffi/device/matmul/params.h"
#include "ffi/device/ptx/cp_async.cuh"
#include "ffi/device/ptx/mma.cuh"
#include "ffi/device/ptx/shared_memory.cuh"
#include "ffi/device/ptx/vectors.cuh"

namespace jax_ep::portable {

// Loads 8 elements, and rounds them to 16 bits if they are float32. Elements from `count` on become
// zeros without being read.
template <typename T>
__device__ inline uint4 LoadVector(const uint16_t* from, int count) {
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
__device__ inline uint4 LoadVector(const float* from, int count) {
  float values[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = i < count ? from[i] : 0;
  return PackVector<T>(values);
}

// Loads from aligned rows, whose length is a multiple of 4 elements.
template <typename T>
__device__ inline uint4 LoadVector(const float4* from, int count) {
  const float4 none = make_float4(0, 0, 0, 0);
  const float4 low = count > 0 ? from[0] : none;
  const float4 high = count > 4 ? from[1] : none;
  const float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  return PackVector<T>(values);
}

// Maps the columns of a tile to columns of the matrix, both counted from the tile's first one. They
// are the same or, for a gated activation, the tile alternates 32 gate columns with the 32 up
// columns that they multiply.
struct TileColumns {
  int num_columns;  // valid columns of the matrix; only those of the gate, if there is one
  int up_offset;    // from a gate column to its up column, or 0

  __device__ int GateColumn(int column) const {
    return up_offset == 0 ? column : column / 64 * 32 + column % 32;
  }
  __device__ int Offset(int column) const {
    return GateColumn(column) + (column % 64 >= 32 ? up_offset : 0);
  }
  // May be negative.
  __device__ int NumRemaining(int column) const { return num_columns - GateColumn(column); }
};

// kRows x kColumns elements. Rows and columns are those of the matrix as it is stored.
template <int kRows, int kColumns, int kThreads>
struct OperandTile {
  static constexpr int kBytes = kRows * kColumns * 2;

  // A vector has 16 bytes: it is what a thread copies at once, and a row of an ldmatrix matrix.
  static constexpr int kVectorElements = 8;
  static constexpr int kRowVectors = kColumns / kVectorElements;
  static constexpr int kVectorsPerThread = kRows * kRowVectors / kThreads;
  static_assert(kRows * kRowVectors == kVectorsPerThread * kThreads,
                "all threads copy the same number of vectors");
  static_assert(kThreads % kRowVectors == 0, "a thread copies the same columns of all its rows");
  static_assert(kRows % 16 == 0 && kColumns % 16 == 0, "fragments are 16 x 16");

  // Returns the byte offset of a vector. Shared memory serves 128 bytes at once, 16 from each of 8
  // bank columns. ldmatrix reads the same vector of 8 consecutive rows, the first a multiple of 8,
  // so these must lie in 8 different columns. Rows of 128 bytes or more all begin in the same
  // column; the XOR with the row makes the columns differ. With rows of 64 bytes every second row
  // begins in the same column. Copies write adjacent vectors, whose columns always differ.
  __device__ static int Offset(int row, int vector) {
    static_assert(kRowVectors == 4 || kRowVectors % 8 == 0, "rows have 64 or n * 128 bytes");
    const int column = vector ^ (kRowVectors == 4 ? row / 2 % 4 : row % 8);
    return (row * kRowVectors + column) * 16;
  }

  // Fills the tile from the matrix, beginning at element `first`. Elements outside of `num_rows`
  // and `columns`, both of which may be negative, become zeros without being read. The tile is
  // complete after CpAsyncCommitGroup, CpAsyncWaitGroup and a barrier. kUseCpAsync requires that
  // the matrix is aligned and has 16-bit elements.
  template <typename T, bool kUseCpAsync, bool kMayBeFloat32>
  __device__ static void Fill(uint32_t tile, const MatmulOperand& matrix, int64_t first,
                              int num_rows, TileColumns columns) {
    if (kMayBeFloat32 && !kUseCpAsync && matrix.is_float32) {
      const float* const data = static_cast<const float*>(matrix.data) + first;
      if (matrix.is_aligned) {
        FillByRegisters<T, float4>(tile, data, matrix.row_stride, num_rows, columns);
      } else {
        FillByRegisters<T, float>(tile, data, matrix.row_stride, num_rows, columns);
      }
    } else {
      const uint16_t* const data = static_cast<const uint16_t*>(matrix.data) + first;
      if (kUseCpAsync || matrix.is_aligned) {
        FillByCpAsync(tile, data, matrix.row_stride, num_rows, columns);
      } else {
        FillByRegisters<T, uint16_t>(tile, data, matrix.row_stride, num_rows, columns);
      }
    }
  }

  // Loads the 16 x 16 fragment at the given row and vector as four 8 x 8 matrices. The second
  // matrix lies 8 rows below the first if kRowsFirst, otherwise 8 columns beside it. The third is
  // its other neighbor, and the fourth lies diagonally.
  template <bool kTransposed, bool kRowsFirst>
  __device__ static void LoadFragment(uint32_t tile, int row, int vector, uint32_t (&matrices)[4]) {
    const int lane = threadIdx.x % 32;
    const int second = lane / 8 % 2;
    const int third = lane / 16;
    row += lane % 8 + 8 * (kRowsFirst ? second : third);
    vector += kRowsFirst ? third : second;
    LdMatrix<kTransposed>(tile + Offset(row, vector), matrices);
  }

 private:
  static constexpr int kRowsAtOnce = kThreads / kRowVectors;

  // Aligned rows end at a multiple of a vector, so a vector is either inside or outside.
  __device__ static void FillByCpAsync(uint32_t tile, const uint16_t* from, int64_t row_stride,
                                       int num_rows, TileColumns columns) {
    const int vector = threadIdx.x % kRowVectors;
    from += columns.Offset(vector * kVectorElements);
    const bool is_inside = columns.NumRemaining(vector * kVectorElements) > 0;
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
      const int row = threadIdx.x / kRowVectors + i * kRowsAtOnce;
      CpAsync<16>(tile + Offset(row, vector), from + row * row_stride, row < num_rows && is_inside);
    }
  }

  // Issues all loads before the first store, to hide the latency of global memory.
  template <typename T, typename Source, typename Element>
  __device__ static void FillByRegisters(uint32_t tile, const Element* from, int64_t row_stride,
                                         int num_rows, TileColumns columns) {
    const int vector = threadIdx.x % kRowVectors;
    from += columns.Offset(vector * kVectorElements);
    const int count = columns.NumRemaining(vector * kVectorElements);
    uint4 vectors[kVectorsPerThread];
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
      const int row = threadIdx.x / kRowVectors + i * kRowsAtOnce;
      vectors[i] = LoadVector<T>(reinterpret_cast<const Source*>(from + row * row_stride),
                                 row < num_rows ? count : 0);
    }
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
      const int row = threadIdx.x / kRowVectors + i * kRowsAtOnce;
      StoreShared(tile + Offset(row, vector), vectors[i]);
    }
  }
};

}  // namespace jax_ep::portable

#endif  // JAX_EP_DEVICE_MATMUL_PORTABLE_OPERAND_TILE_CUH_
