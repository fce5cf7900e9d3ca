// 16 rows of a matrix on their way between the registers of one warp and memory (sm_90).
#ifndef JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_STAGING_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_STAGING_CUH_

#include "ffi/device/matmul/sm90/prefix_maps.cuh"
#include "ffi/device/ptx/barrier.cuh"
#include "ffi/device/ptx/bulk_copy.cuh"
#include "ffi/device/ptx/mma.cuh"
#include "ffi/device/ptx/tma.cuh"

namespace jax_ep {

inline constexpr int kResultM = 16;
inline constexpr int kResultN = 256;

// A warp stages two boxes of 16 lines of 128 bytes; the copy engine takes them from there while the
// warp goes on.
inline constexpr int kStagedLine = 128;  // bytes
inline constexpr int kStagedBoxBytes = kResultM * kStagedLine;
inline constexpr int kStagedBoxes = 2;
inline constexpr int kEpilogueBytes = kStagedBoxes * kStagedBoxBytes;
inline constexpr int kStagedWords = kEpilogueBytes / 4 / 32;   // a lane's share
inline constexpr int kBoxWords = kStagedWords / kStagedBoxes;  // of 64 columns in 16 bits

// Which part of the result a warp's rows are.
struct EpilogueCoordinates {
  int32_t group;
  int32_t m;      // first row, of the group's matrix in a gradient
  int32_t n;      // first column
  int32_t num_m;  // rows to store; may be more than there are here, or none
};

// In maps of prefixes: lines that follow are another group's.
__device__ inline TmaCoordinates BoxOfRows(const EpilogueCoordinates& place) {
  return RowsUntil(place.m + place.num_m, place.n, place.m);
}

// The stage of one warp. Words are of two neighbouring columns, in the order of a lane's sums:
// of lane l, word 2 * j + h is row 8 * h + l / 4, columns 8 * j + 2 * (l % 4) and the next.
class EpilogueStaging {
 public:
  // `address`: kEpilogueBytes at a multiple of 1024.
  __device__ explicit EpilogueStaging(uint32_t address)
      : address_(address), first_chunk_(Chunk(threadIdx.x % 16, threadIdx.x % 32 / 16) - address) {}

  __device__ uint32_t Box(uint32_t box) const { return address_ + box * kStagedBoxBytes; }

  // Where a chunk of 16 bytes is: box by box, as the copy engine's swizzle of 128 bytes expects
  // it. Matrices of 8 lines are written 8 chunks at a time: the XOR puts these into 8 different
  // columns of banks.
  __device__ uint32_t Chunk(int line, int chunk) const {
    return Box(chunk / kChunks) + line * kStagedLine + (chunk % kChunks ^ line % 8) * 16;
  }

  // Where this lane has a chunk of a box, if lanes take the chunks of four lines one after another;
  // `line`, the first, is a multiple of four.
  __device__ uint32_t ChunkOfLane(uint32_t box, uint32_t line) const {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t first = Chunk(lane / kChunks, lane % kChunks) - address_;
    return Box(box) + line * kStagedLine + (first ^ line % 8 * 16);
  }

  // Until copies have read the stage. One lane has all the warp's copies.
  __device__ static void Wait() {
    if (ElectOne()) BulkWaitGroupRead<0>();
    __syncwarp();
  }

  // Until they are complete: shared memory must outlive what is sent from it.
  __device__ static void Close() {
    if (ElectOne()) BulkWaitGroup<0>();
  }

  // Four words of this lane, from word `first` of the stage on.
  __device__ void WriteWords(uint32_t first, const uint32_t (&words)[4]) const {
    StMatrix(ChunkOfWords(first), words);
  }
  __device__ void ReadWords(uint32_t first, uint32_t (&words)[4]) const {
    LdMatrix<false>(ChunkOfWords(first), words);
  }

  // All words, in the place of those before. Then the lanes may read each other's.
  __device__ void Replace(const uint32_t (&words)[kStagedWords]) const {
    Wait();
#pragma unroll
    for (int i = 0; i < kStagedWords; i += 4) {
      const uint32_t some[4] = {words[i], words[i + 1], words[i + 2], words[i + 3]};
      WriteWords(i, some);
    }
    __syncwarp();
  }

  // Both boxes side by side, or one; what the map does not have is left out.
  template <int kElementBytes>
  __device__ void Send(const void* tensor_map, TmaCoordinates at, int num_boxes = kStagedBoxes,
                       int first = 0) const {
    FenceProxyAsyncShared();
    __syncwarp();
    if (ElectOne()) {
      for (int i = 0; i < num_boxes; ++i) {
        TmaStore(tensor_map, Box(first + i), at);
        at.column += kStagedLine / kElementBytes;
      }
      BulkCommitGroup();
    }
    __syncwarp();
  }

 private:
  static constexpr int kChunks = kStagedLine / 16;

  // Two chunks of 16 lines have four words of each lane: this one gives the address of line
  // lane % 16, chunk first / 2 + lane / 16. As first / 2 is even, that is one XOR away from the
  // first such chunk.
  __device__ uint32_t ChunkOfWords(uint32_t first) const {
    return Box(first / kBoxWords) + (first_chunk_ ^ first % kBoxWords / 2 * 16);
  }

  uint32_t address_;
  uint32_t first_chunk_;  // from the address on
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_STAGING_CUH_
