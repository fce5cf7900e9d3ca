// Random calls against the contract: one by one, without a host in between, and in graphs.
#ifndef JAX_EP_TESTS_CPP_GPU_TRANSFER_TRANSFER_RANDOM_H_
#define JAX_EP_TESTS_CPP_GPU_TRANSFER_TRANSFER_RANDOM_H_

#include <algorithm>
#include <memory>
#include <vector>

#include "tests/cpp/gpu/transfer/call_sequence.h"
#include "tests/cpp/gpu/transfer/transfer_options.h"

namespace harness {

inline int RowsFor(Random& random, const Routing& routing) {
  const int dropless = routing.ranks * routing.tokens * std::min(routing.top_k, routing.local()) +
                       routing.local() * (routing.align - 1);
  const int rounded = (dropless + routing.align - 1) / routing.align * routing.align;
  if (Uniform(random, 0, 2) == 0) return rounded;
  // Near the demand of uniform routing; the ids are drawn later.
  const int expected = routing.tokens * routing.top_k + routing.local() * (routing.align - 1);
  return std::max(0, Pick(random, {expected, expected * 9 / 10, expected / 2, expected - 1, 0}));
}

// Returns the sizes that NVLink domains of so many ranks may have; 0: one domain has all ranks.
inline std::vector<int> DomainSizes(int ranks) {
  std::vector<int> sizes = {0};
  for (int size = 1; size < ranks; ++size) {
    if (ranks % size == 0) sizes.push_back(size);
  }
  return sizes;
}

// Returns one of them: half of the time 0.
inline int RandomDomainSize(Random& random, int ranks) {
  const std::vector<int> sizes = DomainSizes(ranks);
  return Uniform(random, 0, 1) == 0 ? 0 : sizes[random() % sizes.size()];
}

inline Shape RandomShape(Random& random, int ranks, const Options& options) {
  Shape shape;
  Routing& routing = shape.routing;
  routing.ranks = ranks;
  routing.domain_size = options.domain_size;
  shape.rail_slots = options.rail_slots;
  // With one token per chunk, calls have more chunks than a window of claims has items.
  if (routing.domain_size > 0) shape.chunk_tokens = Pick(random, {0, 1, 1, 2});
  routing.top_k = Pick(random, {1, 2, 3, 4, 8, 8, 11});
  routing.tokens = Pick(random, {0, 1, 5, 16, 33, 64, 100});
  int local = Pick(random, {1, 2, 3, 4, 8, 8, 24});
  int chunks = Pick(random, {1, 2, 3, 8, 31, 33});
  if (Uniform(random, 0, 9) == 0) {  // long rows: several rounds of a warp
    chunks = Pick(random, {256, 257, 448, 896});
    routing.tokens = std::min(routing.tokens, 6);
  } else if (Uniform(random, 0, 9) == 0) {
    routing.top_k = Pick(random, {31, 32, 33, 40, 64});
    routing.tokens = std::min(routing.tokens, 16);
  } else if (Uniform(random, 0, 9) == 0) {
    local = std::min(Pick(random, {511, 512, 700}), jax_ep::kMaxExperts / ranks);
  }
  if (options.tiny) {
    // Chunks over several domains have eight tokens or more.
    routing.tokens = std::min(routing.tokens, options.domain_size == 0 ? 8 : 40);
    chunks = std::min(chunks, 3);
    if (Uniform(random, 0, 9) == 0) {  // several segments
      routing.tokens = std::min(routing.tokens, 3);
      chunks = Pick(random, {65, 129, 257});
    }
  }
  routing.experts = local * ranks;
  routing.align = Pick(random, {1, 1, 8, 128});
  if (local > 100) routing.align = Pick(random, {1, 8});
  routing.rows = RowsFor(random, routing);
  shape.type = static_cast<ElementType>(Pick(random, {jax_ep::kBF16, jax_ep::kF16, jax_ep::kF32}));
  shape.hidden = static_cast<int>(chunks * 16 / jax_ep::ElementBytes(shape.type));
  shape.has_weights = Uniform(random, 0, 1);
  shape.has_scalars = Uniform(random, 0, 1);
  shape.zero_tail = Uniform(random, 0, 1);
  shape.allow_low_latency = Uniform(random, 0, 1);
  shape.ring_chunks = Pick(random, {1, 1, 2, 5, 0});
  shape.counts_arrivals = Uniform(random, 0, 2) == 0 && options.domain_size == 0;
  shape.num_sms = options.shared ? Uniform(random, 1, 2) : Pick(random, {0, 1, 7, 32});
  shape.has_own_num_sms = Uniform(random, 0, 3) == 0;
  return shape;
}

// The same routing with another dtype, hidden size and other options.
inline Shape Varied(Random& random, const Shape& like, const Options& options) {
  Shape shape = RandomShape(random, like.routing.ranks, options);
  if (int64_t{like.routing.rows} * shape.row_bytes() > 4 << 20) return like;
  if (Uniform(random, 0, 1)) return like;
  shape.routing = like.routing;
  return shape;
}

inline void AddRandomCalls(Random& random, int ranks, const Options& options, int count,
                           Sequence* calls) {
  std::vector<std::shared_ptr<Dispatched>> dispatched;
  for (int i = 0; i < count; ++i) {
    const int kind = dispatched.empty() ? 0 : Uniform(random, 0, 3);
    if (kind == 0) {
      dispatched.push_back(calls->AddDispatch(RandomShape(random, ranks, options)));
      continue;
    }
    const auto& plan = dispatched[random() % dispatched.size()];
    const Shape shape = Varied(random, plan->shape, options);
    if (kind == 1) {
      calls->AddRedispatch(plan, shape);
    } else {
      calls->AddCombine(plan, shape);
    }
  }
}

// Sets a capacity near the demand, which follows from the ids: a first call finds it.
inline void TestCapacity(Group* group, const Options& options) {
  Random random(options.seed + 100);
  const int before = failures;
  for (const int align : {1, 8, 128}) {
    for (const int change : {-1, 0, 1, -10}) {
      Shape shape = RandomShape(random, group->size(), options);
      Routing& routing = shape.routing;
      routing.tokens = std::max(routing.tokens, 5);
      shape.hidden = 32;
      routing.align = align;
      routing.rows = 1 << 20;
      const uint64_t state = random();
      Random same(state);
      routing.ids = RandomIds(same, routing);
      int demand = 0;
      for (const HostPlan& plan : MakePlans(routing)) {
        demand = std::max(demand, plan.row_offsets.back());
      }
      routing.rows = change == -10 ? demand * 9 / 10 : std::max(0, demand + change);
      group->ResetArenas(0xff);
      same.seed(state);
      Sequence calls(group, &same);
      const auto dispatched = calls.AddDispatch(shape);
      calls.AddCombine(dispatched, shape);
      calls.Fill();
      calls.LaunchAll();
      calls.Check();
    }
  }
  std::printf("%s capacity -1/0/+1/0.9x\n", failures == before ? "PASS" : "FAIL");
}

inline void TestRandom(Group* group, const Options& options) {
  Random random(options.seed);
  const int before = failures;
  const double start = Now();
  int rounds = 0;
  int calls_made = 0;
  const int most = options.tiny ? 6 : 1'000'000;
  for (; rounds < most && failures < 20 && Now() - start < options.seconds; ++rounds) {
    if (rounds % 50 == 0) {  // sometimes with delays, which change all orders
      group->max_delay_ns = rounds % 100 == 50 ? 30'000 : 0;
      group->NewGeneration();
    }
    group->ResetArenas(rounds % 2 ? 0xff : 0x7b);
    Sequence calls(group, &random);
    calls.overwrites_operands = true;
    AddRandomCalls(random, group->size(), options, options.tiny ? 4 : 8, &calls);
    calls.Fill();
    if (rounds % 3 == 0) {
      calls.LaunchRankByRank();
    } else {
      calls.LaunchAll();
    }
    calls.Check();
    calls_made += calls.size();
    if (failures != before) std::printf("FAIL in round %d\n", rounds);
  }
  group->max_delay_ns = 0;
  group->NewGeneration();
  std::printf("%s random: %d rounds, %d calls per rank, %.1f s\n",
              failures == before ? "PASS" : "FAIL", rounds, calls_made, Now() - start);
}

// Sends quantized rows by dispatch and redispatch, and float rows in between. Values and scales are
// any bits. Returns the number of calls.
inline int SendQuantizedRows(Group* group, const Options& options, Random& random,
                             const QuantizedFormat& format, int hidden, int tokens,
                             bool allow_low_latency) {
  Shape shape = RandomShape(random, group->size(), options);
  shape.routing = {.tokens = tokens,
                   .top_k = 3,
                   .experts = 2 * group->size(),
                   .ranks = group->size(),
                   .rows = group->size() * 8 + Uniform(random, 0, 40),  // some are dropped
                   .align = Pick(random, {1, 4}),
                   .domain_size = options.domain_size,
                   .ids = {}};
  shape.hidden = hidden;
  shape.Quantize(format);
  shape.allow_low_latency = allow_low_latency;
  Shape floats = shape;
  floats.type = jax_ep::kBF16;
  floats.hidden = 64;
  floats.num_scales = 0;
  group->ResetArenas(0xff);
  Sequence calls(group, &random);
  calls.overwrites_operands = true;
  const auto dispatched = calls.AddDispatch(shape);
  calls.AddCombine(dispatched, floats);
  calls.AddRedispatch(dispatched, shape);
  calls.AddRedispatch(calls.AddDispatch(floats), shape);
  calls.Fill();
  calls.LaunchAll();
  calls.Check();
  return calls.size();
}

// Scales are whole vectors, words, or neither; rows are one stage, or several. With many tokens the
// segments of low-latency calls have more words of scales than a warp has lanes.
inline void TestQuantizedRows(Group* group, const Options& options) {
  Random random(options.seed + 150);
  const int before = failures;
  int calls = 0;
  const auto send = [&](const QuantizedFormat& format, int hidden, int tokens) {
    if (hidden * jax_ep::ElementBits(format.values) % 128 != 0) return;
    for (const bool allow_low_latency : {false, true}) {
      if (options.tiny && group->size() > 2 && Uniform(random, 0, 1) == 0) continue;
      calls += SendQuantizedRows(group, options, random, format, hidden, tokens, allow_low_latency);
    }
  };
  for (const QuantizedFormat& format : kQuantizedFormats) {
    for (const int hidden : {16384, 7168, 2912, 2880, 2048, 768, 288, 272, 32, 16}) {
      send(format, hidden, 5);
    }
    const int most = options.domain_size == 0 ? 900 / group->size() : 128;
    if (!format.has_blocks || format.scales == jax_ep::kF32) continue;
    send(format, 16384, most);
  }
  std::printf("%s quantized rows: %d calls per rank\n", failures == before ? "PASS" : "FAIL",
              calls);
}

// Launches the same sequence again and again, without host synchronization in between.
inline void TestBackToBack(Group* group, const Options& options) {
  Random random(options.seed + 200);
  const int before = failures;
  group->ResetArenas(0xff);
  Sequence calls(group, &random);
  AddRandomCalls(random, group->size(), options, 10, &calls);
  calls.Fill();
  const int repeats = options.tiny ? 3 : 300;
  for (int i = 0; i < repeats; ++i) calls.LaunchAll();
  calls.Check();
  std::printf("%s back to back: %d calls per rank\n", failures == before ? "PASS" : "FAIL",
              repeats * calls.size());
}

inline void TestGraph(Group* group, const Options& options) {
  Random random(options.seed + 300);
  const int before = failures;
  int replays = 0;
  for (int round = 0; round < (options.tiny ? 1 : 6); ++round) {
    group->ResetArenas(0xff);
    Sequence calls(group, &random);
    AddRandomCalls(random, group->size(), options, 6, &calls);
    const std::vector<cudaGraphExec_t> graphs = group->Capture([&](int r) {
      for (int call = 0; call < calls.size(); ++call) calls.Launch(call, r);
    });
    for (int replay = 0; replay < (options.tiny ? 2 : 20); ++replay, ++replays) {
      calls.Fill();
      for (int repeat = 0; repeat < 2; ++repeat) {
        for (int r = 0; r < group->size(); ++r) {
          CUDA_OK(cudaSetDevice(group->ranks[r].device));
          CUDA_OK(cudaGraphLaunch(graphs[r], group->ranks[r].stream));
        }
      }
      if (replay % 4 == 3) calls.LaunchAll();  // plain calls between replays
      calls.Check();
    }
    for (cudaGraphExec_t graph : graphs) CUDA_OK(cudaGraphExecDestroy(graph));
  }
  std::printf("%s graph: %d replays with new inputs\n", failures == before ? "PASS" : "FAIL",
              replays);
}

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_TRANSFER_TRANSFER_RANDOM_H_
