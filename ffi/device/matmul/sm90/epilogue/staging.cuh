// Staging buffer of the sm_90 epilogues: 16 rows of results between a warp's registers and memory.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_STAGING_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_STAGING_CUH_

#include "ffi/device/matmul/sm90/epilogue/epilogue.cuh"
#include "ffi/device/matmul/sm90/shapes.h"
#include "ffi/device/ptx/barrier.cuh"
#include "ffi/device/ptx/bulk_copy.cuh"
#include "ffi/device/ptx/mma.cuh"
#include "ffi/device/ptx/shared_memory.cuh"
#include "ffi/device/ptx/tma.cuh"

namespace jax_ep::sm90 {

// A word holds two adjacent columns as 16-bit elements, in the order of a lane's accumulators: word
// 2 * j + h of lane l is row 8 * h + l / 4, columns 8 * j + 2 * (l % 4) and the next.
inline constexpr int kStagingWords = kWarpStagingBytes / 4 / 32;  // per lane
inline constexpr int kBoxWords = kStagingWords / kStagingBoxes;   // per lane, in one box
static_assert(2 * kStagingWords == kAccumulators / 2, "the buffer holds half of a warp's results");

// Rounds half `half` of a lane's accumulators to words.
template <typename T>
__device__ inline void PackHalf(const float (&accumulators)[kAccumulators], int half,
                                uint32_t (&words)[kStagingWords]) {
#pragma unroll
  for (int i = 0; i < kStagingWords; ++i) {
    words[i] = T::Pack(accumulators + 2 * (half * kStagingWords + i));
  }
}

// The staging buffer of one warp: kStagingBoxes boxes of 16 rows, kBoxStride bytes apart. All
// functions are called by the whole warp.
template <int kBoxStride = kStagingBoxBytes>
class EpilogueStaging {
 public:
  static_assert(kBoxStride % 1024 == 0, "swizzle atoms begin at multiples of 1024 bytes");

  // `address`: of the first box, a multiple of 1024.
  __device__ explicit EpilogueStaging(uint32_t address)
      : address_(address),
        first_vector_(Vector(threadIdx.x % 16, threadIdx.x % 32 / 16) - address) {}

  __device__ uint32_t Box(uint32_t box) const { return address_ + box * kBoxStride; }

  // Returns the address of a vector of 16 bytes, with the 128-byte swizzle of TMA; `vector` runs
  // through the boxes. stmatrix writes the same vector of 8 rows at once: the XOR puts these into 8
  // different bank columns.
  __device__ uint32_t Vector(int row, int vector) const {
    return Box(vector / kRowVectors) + row * kSwizzleBytes + (vector % kRowVectors ^ row % 8) * 16;
  }

  // Returns the address of this lane's vector when the warp takes four rows of a box, with 8 lanes
  // to a row. `first_row` is a multiple of 4.
  __device__ uint32_t LaneVector(uint32_t box, uint32_t first_row) const {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t first = Vector(lane / kRowVectors, lane % kRowVectors) - address_;
    return Box(box) + first_row * kSwizzleBytes + (first ^ first_row % 8 * 16);
  }

  // Waits until TMA has read the buffer. One lane issues all stores of the warp.
  __device__ static void WaitUntilRead() {
    if (ElectOne()) BulkWaitGroupRead<0>();
    __syncwarp();
  }

  // Waits until all stores are complete. Shared memory must not be freed before.
  __device__ static void WaitUntilComplete() {
    if (ElectOne()) BulkWaitGroup<0>();
  }

  // Write and read four words of this lane, from word `first` of the buffer on.
  __device__ void WriteWords(uint32_t first, const uint32_t (&words)[4]) const {
    StMatrix(WordsAddress(first), words);
  }
  __device__ void ReadWords(uint32_t first, uint32_t (&words)[4]) const {
    LdMatrix<false>(WordsAddress(first), words);
  }

  // Replaces the contents of the buffer, once TMA has read them. Afterwards all lanes may read all
  // words.
  __device__ void Replace(const uint32_t (&words)[kStagingWords]) const {
    WaitUntilRead();
#pragma unroll
    for (int i = 0; i < kStagingWords; i += 4) {
      const uint32_t some[4] = {words[i], words[i + 1], words[i + 2], words[i + 3]};
      WriteWords(i, some);
    }
    __syncwarp();
  }

  // The same for results that T rounds to 16 bits, a few words at a time: registers may be scarce.
  // Store has to follow.
  template <typename T>
  __device__ void ReplaceRounded(const float (&results)[2 * kStagingWords]) const {
    WaitUntilRead();
#pragma unroll
    for (int i = 0; i < kStagingWords; i += 4) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) words[j] = T::Pack(results + 2 * (i + j));
      WriteWords(i, words);
    }
  }

  // Stores boxes to memory, side by side from `coordinates` on; `adds`: adds them, in float32. TMA
  // skips what lies outside of the tensor.
  template <int kElementBytes>
  __device__ void Store(const void* tensor_map, TmaCoordinates coordinates,
                        int num_boxes = kStagingBoxes, int first_box = 0, bool adds = false) const {
    FenceProxyAsyncShared();
    __syncwarp();
    if (ElectOne()) {
#pragma unroll
      for (int i = 0; i < kStagingBoxes; ++i) {
        if (i >= num_boxes) break;
        if (adds) {
          TmaReduceAdd(tensor_map, Box(first_box + i), coordinates);
        } else {
          TmaStore(tensor_map, Box(first_box + i), coordinates);
        }
        coordinates.column += kSwizzleBytes / kElementBytes;
      }
      BulkCommitGroup();
    }
    __syncwarp();
  }

  // Stores a warp's accumulators, 16 rows of them, in float32: as many columns at a time as the
  // buffer holds. `adds`: as in Store.
  template <int kCount>
  __device__ void StoreFloat32(const void* tensor_map, TmaCoordinates box,
                               const float (&accumulators)[kCount], bool adds) const {
    constexpr int kAllColumns = kCount * 32 / 16;
    constexpr int kColumns = kStagingBoxes * kSwizzleBytes / 4;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int first = 0; first < kAllColumns; first += kColumns) {
      WaitUntilRead();
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int vector = 2 * j + lane % 4 / 2;
          StoreShared(Vector(half * 8 + lane / 4, vector) + lane % 2 * 8,
                      &accumulators[first / 2 + 4 * j + 2 * half]);
        }
      }
      Store<4>(tensor_map, box, kStagingBoxes, 0, adds);
      box.column += kColumns;
    }
  }

 private:
  static constexpr int kRowVectors = kSwizzleBytes / 16;

  // Four words of every lane fill two vectors of 16 rows. This lane gives the address of row
  // lane % 16 of vector first / 2 + lane / 16. Since first / 2 is even, that is one XOR away from
  // first_vector_.
  __device__ uint32_t WordsAddress(uint32_t first) const {
    return Box(first / kBoxWords) + (first_vector_ ^ first % kBoxWords / 2 * 16);
  }

  uint32_t address_;
  uint32_t first_vector_;  // offset from address_
};

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_STAGING_CUH_
