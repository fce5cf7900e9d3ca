// Results of 16 rows and 256 columns in the registers of one warp, stored to memory (sm_90).
//
// The registers are those of wgmma.cuh: of lane l, sums[4 * j + 2 * h + i] is row 8 * h + l / 4,
// column 8 * j + 2 * (l % 4) + i.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_STORE_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_STORE_CUH_

#include "ffi/device/matmul/sm90/epilogue_staging.cuh"
#include "ffi/device/ptx/element_types.cuh"
#include "ffi/device/ptx/shared_memory.cuh"
#include "ffi/device/ptx/tma.cuh"

namespace jax_ep {

class StoreEpilogue {
 public:
  // `tensor_map`: boxes of 16 lines of 128 bytes.
  __device__ StoreEpilogue(const void* tensor_map, uint32_t staging)
      : tensor_map_(tensor_map), stage_(staging) {}

  // In 16 bits. Takes the sums' values, so that they can be written again at once, and leaves most
  // of the work to Continue.
  template <typename T>
  __device__ void StoreRounded(const TmaCoordinates& place, const float (&sums)[kResultN / 2]) {
    uint32_t words[kStagedWords];
#pragma unroll
    for (int i = 0; i < kStagedWords; ++i) words[i] = T::Pack(sums + 2 * i);
    stage_.Replace(words);
#pragma unroll
    for (int i = 0; i < kStagedWords; ++i) kept_[i] = T::Pack(sums + 2 * kStagedWords + 2 * i);
    place_ = place;
    to_do_ = 2;
  }

  // One of two steps. The second waits for the copies of the first: better some time later.
  __device__ void Continue() {
    if (to_do_ == 0) return;
    if (to_do_ == 1) {
      stage_.Replace(kept_);
    }
    stage_.Send<2>(tensor_map_, place_);
    place_.column += kStagedBoxes * kStagedLine / 2;
    --to_do_;
  }

  // As float32.
  __device__ void StoreFloat32(TmaCoordinates place, const float (&sums)[kResultN / 2]) {
    constexpr int kColumns = kStagedBoxes * kStagedLine / 4;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int first = 0; first < kResultN; first += kColumns) {
      stage_.Wait();
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int chunk = 2 * j + lane % 4 / 2;
          StoreShared(stage_.Chunk(half * 8 + lane / 4, chunk) + lane % 2 * 8,
                      &sums[first / 2 + 4 * j + 2 * half]);
        }
      }
      stage_.Send<4>(tensor_map_, place);
      place.column += kColumns;
    }
  }

  // To be called before the next Store.
  __device__ void Finish() {
    Continue();
    Continue();
    to_do_ = 0;  // as it is: for the compiler, which then needs no registers for what is kept
  }

  // To be called last, after Finish.
  __device__ void Close() { stage_.Close(); }

 private:
  const void* const tensor_map_;
  const EpilogueStaging stage_;
  int to_do_ = 0;
  TmaCoordinates place_ = {};
  uint32_t kept_[kStagedWords] = {};
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_STORE_CUH_
