// Results of 16 rows and 256 columns in the registers of one warp, on their way to memory (sm_90).
//
// The registers are those of wgmma.cuh: of lane l, sums[4 * j + 2 * h + i] is row 8 * h + l / 4,
// column 8 * j + 2 * (l % 4) + i.
#ifndef JAX_EP_DEVICE_RESULT_ROWS_CUH_
#define JAX_EP_DEVICE_RESULT_ROWS_CUH_

#include "ffi/device/async_copy.cuh"
#include "ffi/device/mbarrier.cuh"
#include "ffi/device/numbers.cuh"
#include "ffi/device/tensor_core.cuh"

namespace jax_ep {

inline constexpr int kResultM = 16;
inline constexpr int kResultN = 256;

// A warp stages two boxes of 16 lines of 128 bytes, and the copy engine takes them from there while
// the warp goes on.
inline constexpr int kStagedLine = 128;  // bytes
inline constexpr int kStagedBoxBytes = kResultM * kStagedLine;
inline constexpr int kStagedBoxes = 2;
inline constexpr int kStagedBytes = kStagedBoxes * kStagedBoxBytes;

// A stack of row-major matrices.
struct ResultMatrix {
  const void* tensor_map;  // boxes of 16 lines of 128 bytes; not needed where it is not said
  void* data;
  int32_t num_m;  // of one matrix
  int32_t num_n;
  int32_t pitch;  // elements from row to row
};

// Where in it a warp's rows are.
struct ResultPlace {
  int32_t group;  // which matrix
  int32_t m;      // first row there
  int32_t n;      // first column
  int32_t num_m;  // rows to store; may be more than there are here, or none
};

class ResultRows {
 public:
  // `staging`: the warp's own, kStagedBytes at a multiple of 1024.
  __device__ explicit ResultRows(uint32_t staging) : staging_(staging) {}

  // In 16 bits. Takes the sums' values, so that they can be written again at once, and leaves most
  // of the work to Continue.
  template <typename T>
  __device__ void StoreRounded(const ResultMatrix& matrix, const ResultPlace& place,
                               const float (&sums)[kResultN / 2]) {
    StoreHalfRounded<T>(matrix, place, sums);
#pragma unroll
    for (int i = 0; i < kWords; ++i) kept_[i] = T::Pack(sums + 2 * kWords + 2 * i);
    to_do_ = 2;
  }

  // The first half of the columns only.
  template <typename T>
  __device__ void StoreHalfRounded(const ResultMatrix& matrix, const ResultPlace& place,
                                   const float (&sums)[kResultN / 2]) {
    Finish(matrix);
    uint32_t words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = T::Pack(sums + 2 * i);
    Write(words);
    place_ = place;
    to_do_ = 1;
    is_kept_ = false;
  }

  // One of two steps. The second waits for the copies of the first: better some time later.
  __device__ void Continue(const ResultMatrix& matrix) {
    if (to_do_ == 0) return;
    if (is_kept_) Write(kept_);
    is_kept_ = to_do_ == 2;
    Send<2>(matrix, place_);
    place_.n += kStagedBoxes * kStagedLine / 2;
    --to_do_;
  }

  __device__ void Finish(const ResultMatrix& matrix) {
    Continue(matrix);
    Continue(matrix);
    to_do_ = 0;  // as it is: for the compiler, which then needs no registers for what is kept
  }

  // As float32.
  __device__ void StoreFloat32(const ResultMatrix& matrix, ResultPlace place,
                               const float (&sums)[kResultN / 2]) {
    constexpr int kColumns = kStagedBoxes * kStagedLine / 4;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int first = 0; first < kResultN; first += kColumns) {
      WaitForStage();
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int chunk = 2 * j + lane % 4 / 2;
          StorePair(Chunk(half * 8 + lane / 4, chunk) + lane % 2 * 8,
                    &sums[first / 2 + 4 * j + 2 * half]);
        }
      }
      Send<4>(matrix, place);
      place.n += kColumns;
    }
  }

  // The rest is for what reads or writes more than one matrix, and does it at once. After Finish.

  // Half of the columns, in 16 bits, as words of two.
  __device__ void StoreWords(const ResultMatrix& matrix, const ResultPlace& place,
                             const uint32_t (&words)[kResultN / 8]) {
    Write(words);
    SendByHand<2, kStagedBoxes>(matrix, place, 0);
  }

  // A quarter of the columns in each of two matrices, or only in the first.
  __device__ void StoreQuarters(const ResultMatrix& first, const ResultMatrix& second,
                                bool has_second, const ResultPlace& place,
                                const uint32_t (&words)[kResultN / 8]) {
    Write(words);
    SendByHand<2, 1>(first, place, 0);
    if (has_second) SendByHand<2, 1>(second, place, 1);
  }

  // The reverse. What is not there becomes zeros.
  __device__ void LoadQuarters(const ResultMatrix& first, const ResultMatrix& second,
                               bool has_second, const ResultPlace& place,
                               uint32_t (&words)[kResultN / 8]) {
    WaitForStage();
    const auto copy = [&](const ResultMatrix& matrix, int box) {
      ForEachChunk<2, 1>(matrix, place, [&](int line, int chunk, const uint4* memory) {
        StoreChunk(Chunk(line, box * kChunks + chunk),
                   memory != nullptr ? *memory : make_uint4(0, 0, 0, 0));
      });
    };
    copy(first, 0);
    if (has_second) copy(second, 1);
    __syncwarp();
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      uint32_t matrices[4];
      LoadMatrices<false>(Chunk(lane % 16, i / 2 + lane / 16), matrices);
#pragma unroll
      for (int j = 0; j < 4; ++j) words[i + j] = matrices[j];
    }
    __syncwarp();
  }

  // Shared memory must outlive what was stored.
  __device__ void Close(const ResultMatrix& matrix) {
    Finish(matrix);
    if (threadIdx.x % 32 == 0) WaitStores<0>();
  }

 private:
  static constexpr int kChunks = kStagedLine / 16;
  static constexpr int kWords = kStagedBytes / 4 / 32;  // a lane's share of the stage

  // Where a chunk of 16 bytes is: box by box, as the copy engine's swizzle of 128 bytes expects
  // it. Matrices of 8 lines are written 8 chunks at a time: the XOR puts these into 8 different
  // columns of banks.
  __device__ uint32_t Chunk(int line, int chunk) const {
    return staging_ + chunk / kChunks * kStagedBoxBytes + line * kStagedLine +
           (chunk % kChunks ^ line % 8) * 16;
  }

  // f(line, chunk, address or null) for this lane's chunks of kBoxes boxes side by side.
  template <int kElementBytes, int kBoxes, typename F>
  __device__ static void ForEachChunk(const ResultMatrix& matrix, const ResultPlace& place,
                                      const F& f) {
    constexpr int kPerLine = kBoxes * kChunks;
    constexpr int kElements = 16 / kElementBytes;  // of a chunk
    const int lane = threadIdx.x % 32;
    const int64_t first_line = int64_t{place.group} * matrix.num_m + place.m;
#pragma unroll
    for (int i = 0; i < kResultM; i += 32 / kPerLine) {
      const int line = i + lane / kPerLine;
      const int n = place.n + lane % kPerLine * kElements;
      char* const data = static_cast<char*>(matrix.data);
      f(line, lane % kPerLine,
        line < place.num_m && n < matrix.num_n
            ? reinterpret_cast<uint4*>(data +
                                       ((first_line + line) * matrix.pitch + n) * kElementBytes)
            : nullptr);
    }
  }

  // Until the copies have read it. Lane 0 has all the warp's copies.
  __device__ static void WaitForStage() {
    if (threadIdx.x % 32 == 0) WaitStoresRead<0>();
    __syncwarp();
  }

  __device__ void Write(const uint32_t (&words)[kWords]) {
    const int lane = threadIdx.x % 32;
    WaitForStage();
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint32_t matrices[4] = {words[i], words[i + 1], words[i + 2], words[i + 3]};
      StoreMatrices(Chunk(lane % 16, i / 2 + lane / 16), matrices);
    }
  }

  template <int kElementBytes>
  __device__ void Send(const ResultMatrix& matrix, const ResultPlace& place) {
    constexpr int kColumns = kStagedLine / kElementBytes;  // of a box
    const int lane = threadIdx.x % 32;
    if (place.num_m >= kResultM) {
      FenceAsyncProxy();
      __syncwarp();
      if (lane == 0) {
        for (int i = 0; i < kStagedBoxes; ++i) {
          const int n = place.n + i * kColumns;
          if (n >= matrix.num_n) break;
          StoreBox(matrix.tensor_map, staging_ + i * kStagedBoxBytes, n, place.m, place.group);
        }
        CommitStores();
      }
      return;
    }
    // Lines that follow may be another group's.
    SendByHand<kElementBytes, 2>(matrix, place, 0);
  }

  // kBoxes from box `first` on.
  template <int kElementBytes, int kBoxes>
  __device__ void SendByHand(const ResultMatrix& matrix, const ResultPlace& place, int first) {
    __syncwarp();
    ForEachChunk<kElementBytes, kBoxes>(matrix, place, [&](int line, int chunk, uint4* memory) {
      if (memory != nullptr) *memory = LoadChunk(Chunk(line, first * kChunks + chunk));
    });
    __syncwarp();
  }

  uint32_t staging_;
  int to_do_ = 0;         // steps of Continue
  bool is_kept_ = false;  // the next has to write what is kept first
  ResultPlace place_ = {};
  uint32_t kept_[kWords] = {};
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_RESULT_ROWS_CUH_
