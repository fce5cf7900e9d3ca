// A kernel that reads rows while a dispatch brings them, as a matmul would: when their counters of
// arrivals say that they are complete.
#ifndef JAX_EP_TESTS_GPU_TRANSFER_ARRIVALS_H_
#define JAX_EP_TESTS_GPU_TRANSFER_ARRIVALS_H_

#include <memory>
#include <string>
#include <vector>

#include "ffi/device/memory.cuh"
#include "ffi/device/token_stage.h"
#include "tests/gpu/sequence.h"
#include "tests/gpu/transfer_options.h"

namespace harness {

struct ReaderStage {
  const uint32_t* arrivals;
  const uint32_t* wanted;  // of each counter
  const uint4* rows;
  uint4* copies;
  int32_t num_counters;
  int32_t row_chunks;
};

// Copies rows, one counter's after another's; or what is there after ten seconds.
__global__ void ReadArrivals(const __grid_constant__ ReaderStage stage) {
  const uint64_t start = jax_ep::Nanoseconds();
  for (int i = blockIdx.x; i < stage.num_counters; i += gridDim.x) {
    const uint32_t wanted = stage.wanted[i];
    if (threadIdx.x == 0) {
      while (jax_ep::LoadAcquireDevice(&stage.arrivals[i]) < wanted &&
             jax_ep::Nanoseconds() - start < 10'000'000'000) {
        __nanosleep(100);
      }
    }
    __syncthreads();
    const int64_t first = int64_t{i} * jax_ep::kArrivalRows * stage.row_chunks;
    const int64_t end = first + int64_t{wanted} * stage.row_chunks;
    for (int64_t at = first + threadIdx.x; at < end; at += blockDim.x) {
      stage.copies[at] = jax_ep::LoadShared16(&stage.rows[at]);
    }
  }
}

inline constexpr int kReaderBlocks = 4;
inline constexpr int kReaderThreads = 256;

// It is launched before the dispatch, or after it.
inline void TestArrivals(Group* group, const Options& options) {
  Random random(options.seed + 270);
  const int before = failures;
  std::vector<cudaStream_t> streams(group->size());
  for (int r = 0; r < group->size(); ++r) {
    CUDA_OK(cudaSetDevice(group->ranks[r].device));
    CUDA_OK(cudaStreamCreateWithFlags(&streams[r], cudaStreamNonBlocking));
  }
  const int rounds = options.tiny ? 4 : 60;
  for (int round = 0; round < rounds; ++round) {
    Shape shape;
    const int tokens = options.tiny ? 9 : Pick(random, {300, 1000, 2000});
    const int align = Pick(random, {1, 8, 128});
    shape.routing = {.tokens = tokens,
                     .top_k = 4,
                     .experts = 4 * group->size(),
                     .ranks = group->size(),
                     .rows = tokens * 6 + 4 * align,
                     .align = align,
                     .ids = {}};
    shape.hidden = options.tiny ? 64 : Pick(random, {256, 2048});
    shape.num_sms = options.shared ? 2 : Pick(random, {1, 16, 120});
    shape.zero_tail = Uniform(random, 0, 1);
    shape.counts_arrivals = true;
    group->max_delay_ns = round % 2 == 0 ? 0 : 30'000;
    group->NewGeneration();
    group->ResetArenas(0xff);
    Sequence calls(group, &random);
    const auto dispatched = calls.AddDispatch(shape);
    calls.Fill();
    std::vector<ReaderStage> readers;
    for (int r = 0; r < group->size(); ++r) {
      const jax_ep::DispatchCall& call = dispatched->calls[r];
      const auto wanted = Sequence::AllArrivals(shape, dispatched->plans[r]);
      const int64_t bytes = shape.routing.rows * shape.row_bytes();
      CUDA_OK(cudaMemset(call.arrivals, 0, wanted.size() * sizeof(uint32_t)));
      readers.push_back(
          {call.arrivals, group->Upload(r, wanted), static_cast<const uint4*>(call.rows),
           reinterpret_cast<uint4*>(group->Allocate<uint8_t>(r, bytes)),
           static_cast<int32_t>(wanted.size()), static_cast<int32_t>(shape.row_bytes() / 16)});
    }
    const auto read = [&] {
      for (int r = 0; r < group->size(); ++r) {
        CUDA_OK(cudaSetDevice(group->ranks[r].device));
        void* arguments[] = {&readers[r]};
        CUDA_OK(cudaLaunchKernel(reinterpret_cast<const void*>(ReadArrivals), dim3(kReaderBlocks),
                                 dim3(kReaderThreads), arguments, 0, streams[r]));
      }
    };
    if (round % 4 < 2) read();
    for (int r = 0; r < group->size(); ++r) {
      CUDA_OK(cudaSetDevice(group->ranks[r].device));
      STATUS_OK(jax_ep::LaunchDispatch(dispatched->calls[r], group->ranks[r].stream));
    }
    if (round % 4 >= 2) read();
    calls.Check();
    for (int r = 0; r < group->size(); ++r) {
      CUDA_OK(cudaStreamSynchronize(streams[r]));
      const int64_t bytes = dispatched->plans[r].row_offsets.back() * shape.row_bytes();
      Expect("rows read as they arrive", r, group->Download<uint8_t>(r, readers[r].copies, bytes),
             group->Download<uint8_t>(r, readers[r].rows, bytes));
    }
  }
  for (int r = 0; r < group->size(); ++r) {
    CUDA_OK(cudaSetDevice(group->ranks[r].device));
    CUDA_OK(cudaStreamDestroy(streams[r]));
  }
  group->max_delay_ns = 0;
  group->NewGeneration();
  std::printf("%s rows read as they arrive: %d calls a rank\n",
              failures == before ? "PASS" : "FAIL", rounds);
}

}  // namespace harness

#endif  // JAX_EP_TESTS_GPU_TRANSFER_ARRIVALS_H_
