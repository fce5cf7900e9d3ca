// A kernel that reads rows during a dispatch, as a matmul would: when the arrival counters tell
// that they are complete.
#ifndef JAX_EP_TESTS_CPP_GPU_TRANSFER_TRANSFER_ARRIVALS_H_
#define JAX_EP_TESTS_CPP_GPU_TRANSFER_TRANSFER_ARRIVALS_H_

#include <vector>

#include "ffi/device/ptx/memory.cuh"
#include "ffi/device/transfer/dispatch/token_params.h"
#include "tests/cpp/gpu/transfer/call_sequence.h"
#include "tests/cpp/gpu/transfer/transfer_options.h"

namespace harness {

struct ReaderStage {
  const uint64_t* arrivals;
  uint64_t sequence;
  bool waits_for_groups;
  const int32_t* end;  // the end of all groups' rows
  const uint4* rows;
  const float* row_weights;
  uint4* read_rows;
  float* read_weights;
  int32_t row_vectors;
};

// One thread calls it. It ends ten seconds after `start` at the latest.
__device__ inline void AwaitArrivals(const uint64_t* counter, uint64_t value, uint64_t start) {
  while (jax_ep::LoadAcquireDevice(counter) < value &&
         static_cast<int64_t>(jax_ep::GlobalTimer() - start) < 10'000'000'000) {
    __nanosleep(100);
  }
}

// Copies rows in the order of their counters.
__global__ void ReadArrivals(const __grid_constant__ ReaderStage stage) {
  const uint64_t start = jax_ep::GlobalTimer();
  const auto wanted = [&](int count) { return jax_ep::ArrivalValue(stage.sequence, count); };
  if (threadIdx.x == 0 && stage.waits_for_groups) {
    AwaitArrivals(&stage.arrivals[0], wanted(1), start);
  }
  __syncthreads();
  const int32_t end = jax_ep::LoadGlobalNoAllocate(stage.end);
  for (int i = blockIdx.x; i * jax_ep::kArrivalRows < end; i += gridDim.x) {
    const int32_t first = i * jax_ep::kArrivalRows;
    const int32_t count = min(end - first, jax_ep::kArrivalRows);
    if (threadIdx.x == 0) AwaitArrivals(&stage.arrivals[1 + i], wanted(count), start);
    __syncthreads();
    const int64_t first_chunk = int64_t{first} * stage.row_vectors;
    for (int64_t at = threadIdx.x; at < int64_t{count} * stage.row_vectors; at += blockDim.x) {
      stage.read_rows[first_chunk + at] =
          jax_ep::LoadGlobalNoAllocate(&stage.rows[first_chunk + at]);
    }
    for (int row = first + threadIdx.x; row < first + count; row += blockDim.x) {
      stage.read_weights[row] = jax_ep::LoadGlobalNoAllocate(&stage.row_weights[row]);
    }
  }
}

inline constexpr int kReaderBlocks = 4;
inline constexpr int kReaderThreads = 256;

// Runs dispatches and redispatches with a reader that is launched before or after them.
class ArrivalsTest {
 public:
  ArrivalsTest(Group* group, const Options& options)
      : group_(*group), options_(options), random_(options.seed + 270), streams_(group->size()) {
    for (int r = 0; r < group_.size(); ++r) {
      CUDA_OK(cudaSetDevice(group_.ranks[r].device));
      CUDA_OK(cudaStreamCreateWithFlags(&streams_[r], cudaStreamNonBlocking));
    }
  }

  ~ArrivalsTest() {
    for (int r = 0; r < group_.size(); ++r) {
      CUDA_OK(cudaSetDevice(group_.ranks[r].device));
      CUDA_OK(cudaStreamDestroy(streams_[r]));
    }
  }
  ArrivalsTest(const ArrivalsTest&) = delete;
  ArrivalsTest& operator=(const ArrivalsTest&) = delete;

  void Run(bool redispatch, bool reader_first) {
    const Shape shape = RandomShape();
    group_.ResetArenas(0xff);
    Sequence calls(&group_, &random_);
    const auto dispatched = calls.AddDispatch(shape);
    const auto redispatches = calls.AddRedispatch(dispatched, shape);
    calls.Fill();
    std::vector<ReaderStage> readers;
    for (int r = 0; r < group_.size(); ++r) {
      readers.push_back(redispatch ? Reader(r, shape, (*redispatches)[r])
                                   : Reader(r, shape, dispatched->calls[r]));
      readers[r].waits_for_groups = !redispatch;
      readers[r].end = dispatched->calls[r].plan.row_offsets + shape.routing.local();
    }
    const int read_call = redispatch ? 1 : 0;
    for (int call = 0; call < calls.size(); ++call) {
      // The plan is complete before its reader begins.
      group_.Synchronize();
      const uint64_t sequence = group_.NextSequence(0);
      if (call == read_call && reader_first) Launch(sequence, &readers);
      for (int r = 0; r < group_.size(); ++r) calls.Launch(call, r);
      if (call == read_call && !reader_first) Launch(sequence, &readers);
    }
    calls.Check();
    for (int r = 0; r < group_.size(); ++r) {
      CUDA_OK(cudaStreamSynchronize(streams_[r]));
      const int32_t end = dispatched->plans[r].row_offsets.back();
      const int64_t bytes = end * shape.row_bytes();
      Expect("rows read as they arrive", r,
             group_.Download<uint8_t>(r, readers[r].read_rows, bytes),
             group_.Download<uint8_t>(r, readers[r].rows, bytes));
      Expect("row weights read as they arrive", r,
             group_.Download<float>(r, readers[r].read_weights, end),
             group_.Download<float>(r, readers[r].row_weights, end));
    }
  }

 private:
  Shape RandomShape() {
    Shape shape;
    const int tokens = options_.tiny ? 9 : Pick(random_, {300, 1000});
    const int align = Pick(random_, {1, 8, 128});
    shape.routing = {.tokens = tokens,
                     .top_k = 4,
                     .experts = 4 * group_.size(),
                     .ranks = group_.size(),
                     .rows = tokens * 6 + 4 * align,
                     .align = align,
                     .ids = {}};
    shape.hidden = options_.tiny ? 64 : Pick(random_, {256, 2048});
    shape.num_sms = options_.shared ? 2 : Pick(random_, {1, 16, 120});
    shape.zero_tail = Uniform(random_, 0, 1);
    shape.counts_arrivals = true;
    return shape;
  }

  template <typename Call>
  ReaderStage Reader(int r, const Shape& shape, const Call& call) {
    const int64_t rows = shape.routing.rows;
    ReaderStage reader = {};
    reader.arrivals = call.arrivals;
    reader.rows = static_cast<const uint4*>(call.rows);
    reader.row_weights = call.row_weights;
    reader.read_rows =
        reinterpret_cast<uint4*>(group_.Allocate<uint8_t>(r, rows * shape.row_bytes()));
    reader.read_weights = group_.Allocate<float>(r, rows);
    reader.row_vectors = static_cast<int32_t>(shape.row_bytes() / 16);
    return reader;
  }

  void Launch(uint64_t sequence, std::vector<ReaderStage>* readers) {
    for (int r = 0; r < group_.size(); ++r) {
      CUDA_OK(cudaSetDevice(group_.ranks[r].device));
      (*readers)[r].sequence = sequence;
      void* arguments[] = {&(*readers)[r]};
      CUDA_OK(cudaLaunchKernel(reinterpret_cast<const void*>(ReadArrivals), dim3(kReaderBlocks),
                               dim3(kReaderThreads), arguments, 0, streams_[r]));
    }
  }

  Group& group_;
  const Options& options_;
  Random random_;
  std::vector<cudaStream_t> streams_;
};

inline void TestArrivals(Group* group, const Options& options) {
  const int before = failures;
  ArrivalsTest test(group, options);
  const int rounds = options.tiny ? 4 : 60;
  for (int round = 0; round < rounds; ++round) {
    group->max_delay_ns = round / 4 % 2 == 0 ? 0 : 30'000;
    group->NewGeneration();
    test.Run(round % 2 == 1, round % 4 < 2);
  }
  group->max_delay_ns = 0;
  group->NewGeneration();
  std::printf("%s rows read as they arrive: %d calls a rank\n",
              failures == before ? "PASS" : "FAIL", rounds);
}

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_TRANSFER_TRANSFER_ARRIVALS_H_
