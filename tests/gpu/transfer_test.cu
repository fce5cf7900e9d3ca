// Runs the transfer kernels on N GPUs, or on N ranks that share one, against loops on the host.
//
//   transfer_test [--ranks N] [--shared] [--tiny] [--seconds S] [--seed X] [--only NAME]
//
//   --ranks N     default: all GPUs
//   --shared      all ranks on GPU 0, with few blocks each so that they all fit
//   --tiny        few small calls, for compute-sanitizer (with more than one rank the tool must not
//                 serialize kernels)
//   --seconds S   of the random calls; default 30
//   --only NAME   random, graph, faults or timing
#include <chrono>
#include <cstdlib>
#include <string_view>

#include "tests/gpu/sequence.h"

namespace harness {
namespace {

struct Options {
  int ranks = 0;
  bool shared = false;
  bool tiny = false;
  double seconds = 30;
  uint64_t seed = 1;
  std::string only;
};

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int RowsFor(Random& random, const Routing& routing) {
  const int dropless = routing.ranks * routing.tokens * std::min(routing.top_k, routing.local()) +
                       routing.local() * (routing.align - 1);
  const int rounded = (dropless + routing.align - 1) / routing.align * routing.align;
  if (Uniform(random, 0, 2) == 0) return rounded;
  // What uniform routing needs, more or less; the ids are drawn later.
  const int expected = routing.tokens * routing.top_k + routing.local() * (routing.align - 1);
  return std::max(0, Pick(random, {expected, expected * 9 / 10, expected / 2, expected - 1, 0}));
}

Shape RandomShape(Random& random, int ranks, const Options& options) {
  Shape shape;
  Routing& routing = shape.routing;
  routing.ranks = ranks;
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
    routing.tokens = std::min(routing.tokens, 8);
    chunks = std::min(chunks, 3);
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
  shape.num_sms = options.shared ? Uniform(random, 1, 2) : Pick(random, {0, 1, 7, 32});
  return shape;
}

// The same routing with another dtype, hidden size and other options.
Shape Varied(Random& random, const Shape& like, const Options& options) {
  Shape shape = RandomShape(random, like.routing.ranks, options);
  if (int64_t{like.routing.rows} * shape.row_bytes() > 4 << 20) return like;
  if (Uniform(random, 0, 1)) return like;
  shape.routing = like.routing;
  return shape;
}

void AddRandomCalls(Random& random, int ranks, const Options& options, int count, Sequence* calls) {
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
      calls->AddDispatchByPlan(plan, shape);
    } else {
      calls->AddCombine(plan, shape);
    }
  }
}

// The capacity around the demand needs ids that are known: find the demand, then ask again.
void TestCapacity(Group* group, const Options& options) {
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

void TestRandom(Group* group, const Options& options) {
  Random random(options.seed);
  const int before = failures;
  const double start = Now();
  int rounds = 0;
  int calls_made = 0;
  const int most = options.tiny ? 6 : 1'000'000;
  for (; rounds < most && failures < 20 && Now() - start < options.seconds; ++rounds) {
    if (rounds % 50 == 0) {  // sometimes with delays, which shake the order of everything
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
  std::printf("%s random: %d rounds, %d calls a rank, %.1f s\n",
              failures == before ? "PASS" : "FAIL", rounds, calls_made, Now() - start);
}

// Many calls without a host in between: the same sequence, launched again and again.
void TestBackToBack(Group* group, const Options& options) {
  Random random(options.seed + 200);
  const int before = failures;
  group->ResetArenas(0xff);
  Sequence calls(group, &random);
  AddRandomCalls(random, group->size(), options, 10, &calls);
  calls.Fill();
  const int repeats = options.tiny ? 3 : 300;
  for (int i = 0; i < repeats; ++i) calls.LaunchAll();
  calls.Check();
  std::printf("%s back to back: %d calls a rank\n", failures == before ? "PASS" : "FAIL",
              repeats * calls.size());
}

void TestGraph(Group* group, const Options& options) {
  Random random(options.seed + 300);
  const int before = failures;
  int replays = 0;
  for (int round = 0; round < (options.tiny ? 1 : 6); ++round) {
    group->ResetArenas(0xff);
    Sequence calls(group, &random);
    AddRandomCalls(random, group->size(), options, 6, &calls);
    std::vector<cudaGraphExec_t> graphs(group->size());
    for (int r = 0; r < group->size(); ++r) {
      const Rank& rank = group->ranks[r];
      CUDA_OK(cudaSetDevice(rank.device));
      CUDA_OK(cudaStreamBeginCapture(rank.stream, cudaStreamCaptureModeThreadLocal));
      for (int call = 0; call < calls.size(); ++call) calls.Launch(call, r);
      cudaGraph_t graph;
      CUDA_OK(cudaStreamEndCapture(rank.stream, &graph));
      CUDA_OK(cudaGraphInstantiate(&graphs[r], graph, 0));
      CUDA_OK(cudaGraphUpload(graphs[r], rank.stream));
      CUDA_OK(cudaGraphDestroy(graph));
    }
    group->Synchronize();
    for (int replay = 0; replay < (options.tiny ? 2 : 20); ++replay, ++replays) {
      calls.Fill();
      for (int repeat = 0; repeat < 2; ++repeat) {
        for (int r = 0; r < group->size(); ++r) {
          CUDA_OK(cudaSetDevice(group->ranks[r].device));
          CUDA_OK(cudaGraphLaunch(graphs[r], group->ranks[r].stream));
        }
      }
      if (replay % 4 == 3) calls.LaunchAll();  // beside replays, calls of the ordinary kind
      calls.Check();
    }
    for (cudaGraphExec_t graph : graphs) CUDA_OK(cudaGraphExecDestroy(graph));
  }
  std::printf("%s graph: %d replays with new inputs\n", failures == before ? "PASS" : "FAIL",
              replays);
}

// ---- faults

bool AllNan(const Bytes& data, ElementType type) {
  for (size_t i = 0; i < data.size() / jax_ep::ElementBytes(type); ++i) {
    if (!std::isnan(ReadElement(data, i, type))) return false;
  }
  return true;
}

void ExpectNan(const char* what, Group* group, int r, const void* address, int64_t count,
               ElementType type) {
  if (!AllNan(group->Download<uint8_t>(r, address, count * jax_ep::ElementBytes(type)), type)) {
    Fail(jax_ep::Concatenate(what, " of rank ", r, " is not all NaN"));
  }
}

void ExpectSafe(Group* group, const Dispatched& state, int r, int status) {
  const Routing& sizes = state.shape.routing;
  const jax_ep::PlanResults& plan = state.calls[r].plan;
  const auto all = [&](const char* what, const int32_t* address, int count, int32_t value) {
    Expect(what, r, group->Download<int32_t>(r, address, count),
           std::vector<int32_t>(count, value));
  };
  all("safe group_sizes", plan.group_sizes, sizes.local(), 0);
  all("safe real_group_sizes", plan.real_group_sizes, sizes.local(), 0);
  all("safe row_offsets", plan.row_offsets, sizes.local() + 1, 0);
  all("safe row_source", plan.row_source, 3 * sizes.rows, -1);
  all("safe row_slot", plan.row_slot, sizes.rows, -1);
  all("safe destination", plan.destination, sizes.tokens * sizes.top_k, -1);
  all("safe num_received", plan.num_received, 1, 0);
  all("safe num_dropped", plan.num_dropped, 1, 0);
  all("safe num_bad_ids", plan.num_bad_ids, 1, 0);
  all("status", plan.status, 1, status);
  Expect("safe kept", r, group->Download<uint8_t>(r, plan.kept, sizes.tokens * sizes.top_k),
         Bytes(sizes.tokens * sizes.top_k, 0));
  ExpectNan("rows", group, r, state.calls[r].rows, int64_t{sizes.rows} * state.shape.hidden,
            state.shape.type);
  ExpectNan("row_weights", group, r, state.calls[r].row_weights, sizes.rows, jax_ep::kF32);
}

Shape FaultShape(int ranks, const Options& options) {
  Shape shape;
  shape.routing = {.tokens = 40,
                   .top_k = 4,
                   .experts = 4 * ranks,
                   .ranks = ranks,
                   .rows = 40 * 4 * ranks,
                   .align = 1,
                   .ids = {}};
  shape.hidden = 64;
  shape.num_sms = options.shared ? 2 : 0;
  return shape;
}

void ExpectReport(const Group& group, int r, int peer, jax_ep::Outcome outcome) {
  const jax_ep::AbortRecord& record = *group.ranks[r].record;
  if (record.posted && record.peer == peer && record.rank == r && record.outcome == outcome) return;
  Fail(jax_ep::Concatenate("report of rank ", r, ": posted ", record.posted, ", rank ", record.rank,
                           ", peer ", record.peer, ", outcome ", static_cast<int>(record.outcome)));
}

void TestMissingPeer(Group* group, const Options& options) {
  if (group->size() == 1) return;
  Random random(options.seed + 400);
  const int before = failures;
  const int last = group->size() - 1;
  group->ResetArenas(0x11);
  group->entry_deadline_ns = 200'000'000;
  group->NewGeneration();
  Sequence calls(group, &random);
  const Shape shape = FaultShape(group->size(), options);
  const auto first = calls.AddDispatch(shape);
  const auto second = calls.AddDispatch(shape);
  const auto combined = calls.AddCombine(second, shape);
  const auto third = calls.AddDispatch(shape);
  calls.Fill();
  for (int r = 0; r <= last; ++r) calls.Launch(0, r);
  group->Synchronize();
  const double start = Now();
  for (int call = 1; call < 4; ++call) {
    for (int r = 0; r < last; ++r) calls.Launch(call, r);  // and not on the last rank
  }
  group->Synchronize();
  const double seconds = Now() - start;
  if (seconds > 3) Fail(jax_ep::Concatenate("the abort took ", seconds, " s"));
  for (int call = 1; call < 4; ++call) calls.Launch(call, last);  // late: ends at once, too
  group->Synchronize();
  int reports = 0;
  for (int r = 0; r <= last; ++r) {
    ExpectSafe(group, *second, r, 1);
    ExpectSafe(group, *third, r, 1);
    ExpectNan("out", group, r, (*combined)[r].out, 40 * 64, shape.type);
    ExpectNan("choice_scalars", group, r, (*combined)[r].choice_scalars, 40 * 4, jax_ep::kF32);
    if (r == last || !group->ranks[r].record->posted) continue;
    ++reports;
    ExpectReport(*group, r, last, jax_ep::Outcome::kTimeout);
    if (group->ranks[r].record->epoch != 2) Fail("the report's epoch is not 2");
  }
  if (reports == 0) Fail("nobody reported the missing peer");
  group->entry_deadline_ns = 20'000'000'000;
  group->NewGeneration();
  calls.Fill();
  calls.LaunchAll();  // a new generation works again
  calls.Check();
  std::printf("%s missing peer: ended after %.2f s, %d reports\n",
              failures == before ? "PASS" : "FAIL", seconds, reports);
}

// Ranks that are late at random, with deadlines so short that now this wait gives up and now
// that. What a rank has of a call is whole or safe, and nothing hangs.
void TestGivingUp(Group* group, const Options& options) {
  if (group->size() == 1) return;
  Random random(options.seed + 450);
  const int before = failures;
  int safe = 0;
  int whole = 0;
  for (int round = 0; round < (options.tiny ? 8 : 60); ++round) {
    group->ResetArenas(0x11);
    // From less than a call takes to much more, wherever it runs.
    constexpr int kDoublings[] = {0, 3, 6, 9, 11, 13, 15, 17};
    const uint64_t deadline = uint64_t{20'000} << kDoublings[round % std::size(kDoublings)];
    group->entry_deadline_ns = group->progress_deadline_ns = deadline;
    group->max_delay_ns = std::min<uint64_t>(deadline, 20'000'000);
    group->NewGeneration();
    Sequence calls(group, &random);
    calls.overwrites_operands = true;
    const Shape shape = FaultShape(group->size(), options);
    std::vector<std::shared_ptr<Dispatched>> dispatched;
    for (int i = 0; i < 3; ++i) {
      dispatched.push_back(calls.AddDispatch(shape));
      calls.AddCombine(dispatched.back(), shape);
      calls.AddDispatchByPlan(dispatched.back(), shape);
    }
    calls.Fill();
    calls.LaunchAll();
    group->Synchronize();
    for (const auto& state : dispatched) {
      for (int r = 0; r < group->size(); ++r) {
        const int status = group->Download<int32_t>(r, state->calls[r].plan.status, 1)[0];
        ++(status == 0 ? whole : safe);
        if (status == 0) {
          calls.CheckDispatchOf(*state, r);
        } else {
          ExpectSafe(group, *state, r, status);
        }
      }
    }
  }
  if (safe == 0 || whole == 0) {
    Fail(jax_ep::Concatenate(safe, " results were safe and ", whole, " whole; expected both"));
  }
  group->entry_deadline_ns = group->progress_deadline_ns = 20'000'000'000;
  group->max_delay_ns = 0;
  group->NewGeneration();
  std::printf("%s giving up: %d results of dispatch whole, %d safe\n",
              failures == before ? "PASS" : "FAIL", whole, safe);
}

void TestMismatch(Group* group, const Options& options) {
  if (group->size() == 1) return;
  Random random(options.seed + 500);
  const int before = failures;
  group->ResetArenas(0x11);
  group->NewGeneration();
  Sequence calls(group, &random);
  const Shape shape = FaultShape(group->size(), options);
  const auto first = calls.AddDispatch(shape);
  const auto other = calls.AddDispatch(shape);
  calls.Fill();
  for (int r = 0; r < group->size(); ++r) calls.Launch(r == 0 ? 1 : 0, r);
  group->Synchronize();
  for (int r = 0; r < group->size(); ++r) ExpectSafe(group, r == 0 ? *other : *first, r, 2);
  group->NewGeneration();
  std::printf("%s mismatch of call sites\n", failures == before ? "PASS" : "FAIL");
}

void TestNoWorkspace(Group* group, const Options& options) {
  Random random(options.seed + 600);
  const int before = failures;
  group->ResetArenas(0x11);
  for (const Rank& rank : group->ranks) {
    const uint64_t none = 0;
    CUDA_OK(cudaSetDevice(rank.device));
    CUDA_OK(cudaMemcpy(&rank.control->workspace_bytes, &none, sizeof none, cudaMemcpyHostToDevice));
  }
  Sequence calls(group, &random);
  const auto dispatched = calls.AddDispatch(FaultShape(group->size(), options));
  calls.Fill();
  calls.LaunchAll();
  group->Synchronize();
  for (int r = 0; r < group->size(); ++r) ExpectSafe(group, *dispatched, r, 3);
  group->NewGeneration();
  std::printf("%s released workspace\n", failures == before ? "PASS" : "FAIL");
}

// One rank is given a plan with a status: nobody adds up old sums, and the next calls work.
void TestPoisonedPlan(Group* group, const Options& options) {
  Random random(options.seed + 700);
  const int before = failures;
  group->ResetArenas(0x11);
  Sequence calls(group, &random);
  const Shape shape = FaultShape(group->size(), options);
  const auto dispatched = calls.AddDispatch(shape);
  const auto combined = calls.AddCombine(dispatched, shape);
  calls.Fill();
  calls.LaunchAll();
  calls.Check();
  const int last = group->size() - 1;
  group->Refill(last, dispatched->calls[last].plan.status, std::vector<int32_t>{1});
  for (int r = 0; r <= last; ++r) calls.Launch(1, r);
  group->Synchronize();
  for (int r = 0; r <= last; ++r) {
    ExpectNan("out", group, r, (*combined)[r].out, 40 * 64, shape.type);
  }
  calls.Fill();
  calls.LaunchAll();
  calls.Check();
  std::printf("%s plan with a status\n", failures == before ? "PASS" : "FAIL");
}

// ---- timing

// Distinct experts for each token, uniformly.
std::vector<int32_t> UniformIds(Random& random, const Routing& routing) {
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

struct TimedCalls {
  Shape shape;
  std::vector<jax_ep::DispatchCall> dispatch;
  std::vector<jax_ep::DispatchByPlanCall> by_plan;
  std::vector<jax_ep::CombineCall> combine;
  int64_t remote_bytes = 0;  // into the rank that receives most
};

TimedCalls MakeTimedCalls(Group* group, const Options& options, int tokens) {
  const int n = group->size();
  Random random(options.seed + 800);
  TimedCalls timed;
  Shape& shape = timed.shape;
  shape.routing = {.tokens = tokens,
                   .top_k = 8,
                   .experts = 256 / n * n,
                   .ranks = n,
                   .rows = tokens * 8 * 5 / 4 + 1024,
                   .align = 1,
                   .ids = {}};
  shape.hidden = 7168;
  shape.num_sms = options.shared ? std::max(1, 64 / n) : 0;
  Routing& sizes = shape.routing;
  std::vector<int64_t> received(n);
  for (int r = 0; r < n; ++r) {
    sizes.ids.push_back(UniformIds(random, sizes));
    for (int t = 0; t < tokens; ++t) {
      uint64_t visited = 0;
      for (int k = 0; k < 8; ++k) visited |= 1ull << sizes.ids[r][t * 8 + k] / sizes.local();
      for (int p = 0; p < n; ++p) received[p] += p != r && (visited >> p & 1);
    }
  }
  timed.remote_bytes = *std::max_element(received.begin(), received.end()) * shape.row_bytes();

  group->ResetArenas(0);
  Sequence calls(group, &random);
  const auto dispatched = calls.AddDispatch(shape);
  for (int r = 0; r < n; ++r) {
    jax_ep::DispatchCall call = dispatched->calls[r];
    call.zero_tail = false;
    call.is_in_place = true;
    group->Refill(r, call.topk_ids, sizes.ids[r]);
    // x: bytes that are not all the same, cheaply
    std::vector<uint16_t> x(size_t{1} << 20);
    for (auto& value : x) value = 0x3c00 | (random() & 0x83ff);
    for (int64_t at = 0; at < tokens * shape.row_bytes(); at += x.size() * 2) {
      const size_t bytes = std::min<int64_t>(x.size() * 2, tokens * shape.row_bytes() - at);
      CUDA_OK(cudaMemcpy(static_cast<uint8_t*>(const_cast<void*>(call.x)) + at, x.data(), bytes,
                         cudaMemcpyHostToDevice));
    }
    timed.dispatch.push_back(call);
    jax_ep::DispatchByPlanCall by_plan;
    by_plan.transfer = call.transfer;
    by_plan.zero_tail = false;
    by_plan.has_weights = true;
    by_plan.x = call.x;
    by_plan.plan = dispatched->Operands(r);
    by_plan.topk_weights = call.topk_weights;
    by_plan.rows = call.rows;
    by_plan.row_weights = call.row_weights;
    timed.by_plan.push_back(by_plan);
    jax_ep::CombineCall combine;
    combine.transfer = call.transfer;
    combine.has_weights = true;
    combine.y = call.rows;
    combine.plan = dispatched->Operands(r);
    combine.row_weights = call.row_weights;
    combine.out = group->Allocate<uint8_t>(r, tokens * shape.row_bytes());
    timed.combine.push_back(combine);
  }
  return timed;
}

// Microseconds of `calls` calls in a graph, on the slowest rank; the median of several replays.
template <typename Launch>
double TimeInGraph(Group* group, int calls, const Launch& launch) {
  const int n = group->size();
  std::vector<cudaGraphExec_t> graphs(n);
  std::vector<cudaEvent_t> begin(n), end(n);
  for (int r = 0; r < n; ++r) {
    const Rank& rank = group->ranks[r];
    CUDA_OK(cudaSetDevice(rank.device));
    CUDA_OK(cudaEventCreate(&begin[r]));
    CUDA_OK(cudaEventCreate(&end[r]));
    CUDA_OK(cudaStreamBeginCapture(rank.stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < calls; ++i) launch(r, rank.stream);
    cudaGraph_t graph;
    CUDA_OK(cudaStreamEndCapture(rank.stream, &graph));
    CUDA_OK(cudaGraphInstantiate(&graphs[r], graph, 0));
    CUDA_OK(cudaGraphUpload(graphs[r], rank.stream));
    CUDA_OK(cudaGraphDestroy(graph));
  }
  group->Synchronize();
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

void Timing(const Options& options) {
  cudaDeviceProp properties;
  CUDA_OK(cudaGetDeviceProperties(&properties, 0));
  for (const int tokens : {4096, 128, 1}) {
    jax_ep::WorkspaceLayout layout;
    STATUS_OK(jax_ep::PlanWorkspace({.num_tokens = tokens,
                                     .hidden = 7168,
                                     .top_k = 8,
                                     .num_experts = 256 / options.ranks * options.ranks,
                                     .num_ranks = options.ranks,
                                     .element_bytes = 2},
                                    &layout));
    Group group(options.ranks, options.shared, layout.bytes,
                int64_t{tokens} * 14336 * 14 + (64 << 20));
    const TimedCalls timed = MakeTimedCalls(&group, options, tokens);
    const auto report = [&](const char* what, double us, int64_t bytes) {
      std::printf("TIME %s T=%d H=7168 K=8 bf16, %d ranks%s of %s: %.1f us, %.0f GB/s of %.1f MB\n",
                  what, tokens, options.ranks, options.shared ? " sharing one" : "",
                  properties.name, us, bytes / us / 1000.0, bytes / 1e6);
      std::fflush(stdout);
    };
    const auto dispatch = [&](int r, cudaStream_t stream) {
      STATUS_OK(jax_ep::LaunchDispatch(timed.dispatch[r], stream));
    };
    const auto by_plan = [&](int r, cudaStream_t stream) {
      STATUS_OK(jax_ep::LaunchDispatchByPlan(timed.by_plan[r], stream));
    };
    const auto combine = [&](int r, cudaStream_t stream) {
      STATUS_OK(jax_ep::LaunchCombine(timed.combine[r], stream));
    };
    const int count = tokens <= 128 ? 20 : 4;
    report("dispatch        ", TimeInGraph(&group, count, dispatch), timed.remote_bytes);
    report("dispatch_by_plan", TimeInGraph(&group, count, by_plan), timed.remote_bytes);
    report("combine         ", TimeInGraph(&group, count, combine), timed.remote_bytes);
    for (const Rank& rank : group.ranks) {
      if (rank.record->posted) Fail("a wait ended in the timing");
    }
  }
}

Options Parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view name = argv[i];
    const auto value = [&] { return i + 1 < argc ? argv[++i] : ""; };
    if (name == "--ranks") options.ranks = std::atoi(value());
    if (name == "--shared") options.shared = true;
    if (name == "--tiny") options.tiny = true;
    if (name == "--seconds") options.seconds = std::atof(value());
    if (name == "--seed") options.seed = std::strtoull(value(), nullptr, 10);
    if (name == "--only") options.only = value();
  }
  return options;
}

int Main(int argc, char** argv) {
  // Streams that share a hardware queue would wait for each other; loading later, for everything.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  Options options = Parse(argc, argv);
  int devices = 0;
  CUDA_OK(cudaGetDeviceCount(&devices));
  if (options.ranks == 0) options.ranks = options.shared ? 4 : devices;
  if (!options.shared && options.ranks > devices) {
    std::printf("FAIL %d ranks need as many GPUs; there are %d\n", options.ranks, devices);
    return 1;
  }
  const auto wanted = [&](std::string_view name) {
    return options.only.empty() || options.only == name;
  };
  if (wanted("random") || wanted("graph") || wanted("faults")) {
    Group group(options.ranks, options.shared, size_t{64} << 20, size_t{512} << 20);
    if (wanted("random")) {
      TestCapacity(&group, options);
      TestRandom(&group, options);
      TestBackToBack(&group, options);
    }
    if (wanted("graph")) TestGraph(&group, options);
    if (wanted("faults")) {
      TestPoisonedPlan(&group, options);
      TestMissingPeer(&group, options);
      TestGivingUp(&group, options);
      TestMismatch(&group, options);
      TestNoWorkspace(&group, options);
    }
  }
  if (wanted("timing") && !options.tiny) Timing(options);
  std::printf("%s transfer_test: %d ranks%s\n", failures == 0 ? "PASS" : "FAIL", options.ranks,
              options.shared ? " on one GPU" : "");
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace harness

int main(int argc, char** argv) { return harness::Main(argc, argv); }
