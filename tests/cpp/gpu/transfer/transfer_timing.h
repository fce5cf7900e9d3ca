// Times calls that are chained in a CUDA graph, beside the bandwidth of the links.
#ifndef JAX_EP_TESTS_CPP_GPU_TRANSFER_TRANSFER_TIMING_H_
#define JAX_EP_TESTS_CPP_GPU_TRANSFER_TRANSFER_TIMING_H_

#include <algorithm>
#include <vector>

#include "ffi/runtime/calls/workspace.h"
#include "tests/cpp/gpu/transfer/call_sequence.h"
#include "tests/cpp/gpu/transfer/transfer_options.h"

namespace harness {

// Distinct experts for each token, uniformly.
inline std::vector<int32_t> UniformIds(Random& random, const Routing& routing) {
  std::vector<int32_t> ids;
  for (int t = 0; t < routing.tokens; ++t) {
    std::vector<int32_t> token;
    while (static_cast<int>(token.size()) < routing.top_k) {
      const int id = Uniform(random, 0, routing.experts - 1);
      if (std::find(token.begin(), token.end(), id) == token.end()) token.push_back(id);
    }
    ids.insert(ids.end(), token.begin(), token.end());
  }
  return ids;
}

inline constexpr int kCeilingRepeats = 64;

// A fourth more than uniform routing needs.
inline int RowsOf(const TimedShape& shape) { return shape.tokens * shape.top_k * 5 / 4 + 1024; }

struct TimedCalls {
  Shape shape;
  std::vector<DispatchCall> dispatch;
  std::vector<RedispatchCall> redispatched;
  std::vector<CombineCall> combine;
  std::vector<BulkCopyCeilingCall> ceiling;
  int64_t remote_bytes = 0;  // the busiest rank's: each token counts once per destination rank
};

// Returns the bytes that the busiest rank sends or receives.
inline int64_t RemoteBytes(const Shape& shape) {
  const Routing& sizes = shape.routing;
  std::vector<int64_t> sent(sizes.ranks);
  std::vector<int64_t> received(sizes.ranks);
  for (int r = 0; r < sizes.ranks; ++r) {
    for (int t = 0; t < sizes.tokens; ++t) {
      uint64_t destinations = 0;
      for (int k = 0; k < sizes.top_k; ++k) {
        destinations |= uint64_t{1} << sizes.ids[r][t * sizes.top_k + k] / sizes.local();
      }
      for (int p = 0; p < sizes.ranks; ++p) {
        if (p == r || (destinations >> p & 1) == 0) continue;
        ++sent[r];
        ++received[p];
      }
    }
  }
  return shape.format().wire_bytes(shape.hidden) *
         std::max(*std::max_element(sent.begin(), sent.end()),
                  *std::max_element(received.begin(), received.end()));
}

inline TimedCalls MakeTimedCalls(Group* group, const Options& options,
                                 const TimedShape& timed_shape) {
  const int n = group->size();
  const int tokens = timed_shape.tokens;
  Random random(options.seed + 800);
  TimedCalls timed;
  Shape& shape = timed.shape;
  shape.routing = {.tokens = tokens,
                   .top_k = timed_shape.top_k,
                   .experts = timed_shape.experts / n * n,
                   .ranks = n,
                   .rows = RowsOf(timed_shape),
                   .align = 1,
                   .domain_size = options.domain_size,
                   .ids = {}};
  shape.hidden = timed_shape.hidden;
  if (options.format != nullptr) shape.Quantize(*options.format);
  shape.allow_low_latency = options.allow_low_latency;
  shape.counts_arrivals = options.counts_arrivals;
  shape.num_sms = options.shared ? std::max(1, 64 / n) : timed_shape.num_sms;
  Routing& sizes = shape.routing;
  for (int r = 0; r < n; ++r) sizes.ids.push_back(UniformIds(random, sizes));
  timed.remote_bytes = RemoteBytes(shape);

  group->ResetArenas(0);
  Sequence calls(group, &random);
  const auto dispatched = calls.AddDispatch(shape);
  for (int r = 0; r < n; ++r) {
    DispatchCall call = dispatched->calls[r];
    call.transfer.zero_tail = false;
    group->Refill(r, call.topk_ids, sizes.ids[r]);
    // Fills x with bytes that differ, cheaply.
    std::vector<uint16_t> x(size_t{1} << 20);
    for (auto& value : x) value = 0x3c00 | (random() & 0x83ff);
    for (int64_t at = 0; at < tokens * shape.row_bytes(); at += x.size() * 2) {
      const size_t bytes = std::min<int64_t>(x.size() * 2, tokens * shape.row_bytes() - at);
      CUDA_OK(cudaMemcpy(static_cast<uint8_t*>(const_cast<void*>(call.x)) + at, x.data(), bytes,
                         cudaMemcpyHostToDevice));
    }
    timed.dispatch.push_back(call);
    RedispatchCall redispatched;
    redispatched.transfer = call.transfer;
    redispatched.transfer.has_weights = true;
    redispatched.control = call.control;
    redispatched.x = call.x;
    redispatched.scales = call.scales;
    redispatched.plan = dispatched->Operands(r);
    redispatched.forwarding = dispatched->Forwarding(r);
    redispatched.topk_weights = call.topk_weights;
    redispatched.rows = call.rows;
    redispatched.row_scales = call.row_scales;
    redispatched.row_weights = call.row_weights;
    redispatched.arrivals = call.arrivals;
    timed.redispatched.push_back(redispatched);
    CombineCall combine;
    combine.transfer = redispatched.transfer;
    combine.transfer.has_scalars = false;
    combine.control = call.control;
    combine.y = call.rows;
    combine.plan = dispatched->Operands(r);
    combine.forwarding = dispatched->Forwarding(r);
    combine.row_weights = call.row_weights;
    combine.out = group->Allocate<uint8_t>(r, tokens * shape.row_bytes());
    timed.combine.push_back(combine);
    BulkCopyCeilingCall ceiling;
    ceiling.transfer = call.transfer;
    ceiling.transfer.shape.format = jax_ep::kBFloat16Rows;
    ceiling.transfer.shape.hidden = shape.row_bytes() / 2;
    if (!options.shared) ceiling.transfer.num_sms = 0;
    ceiling.transfer.repeats = kCeilingRepeats;
    ceiling.control = call.control;
    ceiling.x = call.x;
    ceiling.status = dispatched->calls[r].plan.num_bad_ids;
    timed.ceiling.push_back(ceiling);
  }
  return timed;
}

// Microseconds of `calls` calls in a graph, on the slowest rank; the median of several replays.
template <typename Launch>
inline double TimeInGraph(Group* group, int calls, const Launch& launch) {
  const int n = group->size();
  const std::vector<cudaGraphExec_t> graphs = group->Capture([&](int r) {
    for (int i = 0; i < calls; ++i) launch(r, group->ranks[r].stream);
  });
  std::vector<cudaEvent_t> begin(n), end(n);
  for (int r = 0; r < n; ++r) {
    CUDA_OK(cudaSetDevice(group->ranks[r].device));
    CUDA_OK(cudaEventCreate(&begin[r]));
    CUDA_OK(cudaEventCreate(&end[r]));
  }
  std::vector<double> times;
  for (int repeat = 0; repeat < 12; ++repeat) {
    // The first replay starts the ranks together; the second is timed.
    for (int part = 0; part < 2; ++part) {
      for (int r = 0; r < n; ++r) {
        CUDA_OK(cudaSetDevice(group->ranks[r].device));
        if (part == 1) CUDA_OK(cudaEventRecord(begin[r], group->ranks[r].stream));
        CUDA_OK(cudaGraphLaunch(graphs[r], group->ranks[r].stream));
        if (part == 1) CUDA_OK(cudaEventRecord(end[r], group->ranks[r].stream));
      }
    }
    group->Synchronize();
    float slowest = 0;
    for (int r = 0; r < n; ++r) {
      float ms = 0;
      CUDA_OK(cudaEventElapsedTime(&ms, begin[r], end[r]));
      slowest = std::max(slowest, ms);
    }
    if (repeat >= 2) times.push_back(slowest * 1000.0 / calls);
  }
  for (int r = 0; r < n; ++r) {
    CUDA_OK(cudaGraphExecDestroy(graphs[r]));
    CUDA_OK(cudaEventDestroy(begin[r]));
    CUDA_OK(cudaEventDestroy(end[r]));
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

inline void TimeShape(const Options& options, const TimedShape& shape) {
  jax_ep::WorkspaceLayout layout;
  STATUS_OK(jax_ep::PlanWorkspace({.num_tokens = shape.tokens,
                                   .hidden = shape.hidden,
                                   .top_k = shape.top_k,
                                   .num_experts = shape.experts / options.ranks * options.ranks,
                                   .num_ranks = options.ranks,
                                   .domain_size = options.domain_size,
                                   .format = jax_ep::kBFloat16Rows},
                                  &layout));
  const int64_t rows = RowsOf(shape) + int64_t{2} * shape.tokens;
  Group group(options.ranks, options.shared, layout.bytes, rows * shape.hidden * 2 + (64 << 20));
  const TimedCalls timed = MakeTimedCalls(&group, options, shape);
  // So many that the time between two graphs does not count.
  const int count = shape.tokens <= 128 ? 64 : 16;
  double ceiling = 0;  // in bytes per microsecond
  const auto time = [&](const char* what, const auto& launch, const auto& calls) {
    const double us = TimeInGraph(
        &group, count, [&](int r, cudaStream_t stream) { STATUS_OK(launch(calls[r], stream)); });
    std::printf("TIME %-16s T=%d H=%d E=%d K=%d SMs=%d", what, shape.tokens, shape.hidden,
                timed.shape.routing.experts, shape.top_k, timed.shape.num_sms);
    if (options.domain_size > 0) std::printf(" N=%d", options.domain_size);
    std::printf(": %.1f us, %.0f GB/s", us, timed.remote_bytes / us / 1000.0);
    if (ceiling > 0) std::printf(", %.3f of the ceiling", timed.remote_bytes / us / ceiling);
    std::printf("\n");
    std::fflush(stdout);
  };
  if (options.ranks > 1 && options.domain_size == 0 && shape.tokens > 128) {
    const double us = TimeInGraph(&group, 1, [&](int r, cudaStream_t stream) {
      STATUS_OK(LaunchBulkCopyCeiling(timed.ceiling[r], stream));
    });
    ceiling = timed.shape.row_bytes() * shape.tokens * kCeilingRepeats / us;
    std::printf("TIME ceiling: %.1f GB/s\n", ceiling / 1000.0);
  }
  time("dispatch", LaunchDispatch, timed.dispatch);
  time("redispatch", LaunchRedispatch, timed.redispatched);
  if (options.format == nullptr) time("combine", LaunchCombine, timed.combine);
  for (const Rank& rank : group.ranks) {
    if (rank.record->posted) Fail("a wait ended in the timing");
  }
}

inline void Timing(const Options& options) {
  cudaDeviceProp properties;
  CUDA_OK(cudaGetDeviceProperties(&properties, 0));
  std::printf("TIME %s, %d ranks%s of %s\n",
              options.format != nullptr ? options.format->name : "bf16", options.ranks,
              options.shared ? " sharing one" : "", properties.name);
  Options one_level = options;
  one_level.domain_size = 0;
  for (const TimedShape& shape : options.shapes) {
    TimeShape(one_level, shape);
    if (options.domain_size > 0) TimeShape(options, shape);
  }
}

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_TRANSFER_TRANSFER_TIMING_H_
