// Faults: a rank that never calls, times out, makes another call, or has no workspace. Results must
// be safe, and the group must work again.
#ifndef JAX_EP_TESTS_CPP_GPU_TRANSFER_TRANSFER_FAULTS_H_
#define JAX_EP_TESTS_CPP_GPU_TRANSFER_TRANSFER_FAULTS_H_

#include <iterator>
#include <memory>
#include <vector>

#include "tests/cpp/gpu/transfer/call_sequence.h"
#include "tests/cpp/gpu/transfer/transfer_options.h"

namespace harness {

inline void ExpectNan(const char* what, Group* group, int r, const void* address, int64_t count,
                      ElementType type) {
  const int64_t bytes = count * jax_ep::ElementBits(type) / 8;
  if (!AllNan(group->Download<uint8_t>(r, address, bytes), type)) {
    Fail(jax_ep::Concatenate(what, " of rank ", r, " is not all NaN"));
  }
}

inline void ExpectSafe(Group* group, const Dispatched& state, int r, int status) {
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
  all("safe partial_sum_index", plan.partial_sum_index, sizes.rows, -1);
  all("safe destination", plan.destination, sizes.tokens * sizes.top_k, -1);
  all("safe num_received", plan.num_received, 1, 0);
  all("safe num_dropped", plan.num_dropped, 1, 0);
  all("safe num_bad_ids", plan.num_bad_ids, 1, 0);
  all("status", plan.status, 1, status);
  Expect("safe kept", r, group->Download<uint8_t>(r, plan.kept, sizes.tokens * sizes.top_k),
         Bytes(sizes.tokens * sizes.top_k, 0));
  if (sizes.domain_size > 0) {
    const jax_ep::ForwardingResults& forwarding = state.calls[r].forwarding;
    const int64_t words = sizes.num_token_ranks();
    Expect("safe token_ranks", r, group->Download<uint32_t>(r, forwarding.token_ranks, words),
           std::vector<uint32_t>(words));
    all("safe index in the domain", forwarding.partial_sum_index, sizes.rows, -1);
  }
  ExpectNan("rows", group, r, state.calls[r].rows, int64_t{sizes.rows} * state.shape.hidden,
            state.shape.type);
  ExpectNan("row_scales", group, r, state.calls[r].row_scales,
            int64_t{sizes.rows} * state.shape.num_scales, state.shape.scale_type);
  ExpectNan("row_weights", group, r, state.calls[r].row_weights, sizes.rows, jax_ep::kF32);
}

// A row of the first format has 3 words of scales, one of MXFP4 9 bytes.
inline Shape Quantized(Shape shape, const QuantizedFormat& format = kQuantizedFormats[0]) {
  shape.hidden = 288;
  shape.Quantize(format);
  return shape;
}

inline Shape FaultShape(int ranks, const Options& options, bool allow_low_latency) {
  Shape shape;
  shape.routing = {.tokens = 40,
                   .top_k = 4,
                   .experts = 4 * ranks,
                   .ranks = ranks,
                   .rows = 40 * 4 * ranks,
                   .align = 1,
                   .domain_size = options.domain_size,
                   .ids = {}};
  shape.rail_slots = options.rail_slots;
  shape.hidden = 64;
  shape.num_sms = options.shared ? 2 : 0;
  shape.allow_low_latency = allow_low_latency;
  shape.ring_chunks = 2;  // 2 of 14 chunks: senders wait for credits, too
  return shape;
}

inline void ExpectReport(const Group& group, int r, int peer, jax_ep::Outcome outcome) {
  const jax_ep::AbortRecord& record = *group.ranks[r].record;
  if (record.posted && record.peer == peer && record.rank == r && record.outcome == outcome) return;
  Fail(jax_ep::Concatenate("report of rank ", r, ": posted ", record.posted, ", rank ", record.rank,
                           ", peer ", record.peer, ", outcome ", static_cast<int>(record.outcome)));
}

// One rank makes no more calls: the last one, or `missing`.
inline void TestMissingPeer(Group* group, const Options& options, bool allow_low_latency,
                            int missing = -1) {
  if (group->size() == 1) return;
  Random random(options.seed + 400);
  const int before = failures;
  const int last = group->size() - 1;
  if (missing < 0) missing = last;
  group->ResetArenas(0x11);
  group->NewGeneration();
  Sequence calls(group, &random);
  const Shape shape = FaultShape(group->size(), options, allow_low_latency);
  const auto first = calls.AddDispatch(shape);
  const auto second = calls.AddDispatch(shape);
  const auto combined = calls.AddCombine(second, shape);
  const auto third = calls.AddDispatch(shape);
  calls.Fill();
  for (int r = 0; r <= last; ++r) calls.Launch(0, r);
  group->Synchronize();
  for (int r = 0; r <= last; ++r) {
    CheckDispatch(group, *first, r);
    // From now on: the first call may take longer on a machine that is busy.
    group->Refill(r, &group->ranks[r].control->entry_deadline_ns,
                  std::vector<uint64_t>{200'000'000});
  }
  const double start = Now();
  for (int call = 1; call < 4; ++call) {
    for (int r = 0; r <= last; ++r) {
      if (r != missing) calls.Launch(call, r);
    }
  }
  group->Synchronize();
  const double seconds = Now() - start;
  if (seconds > 3) Fail(jax_ep::Concatenate("the abort took ", seconds, " s"));
  for (int call = 1; call < 4; ++call) calls.Launch(call, missing);  // late: ends at once, too
  group->Synchronize();
  int reports = 0;
  for (int r = 0; r <= last; ++r) {
    ExpectSafe(group, *second, r, 1);
    ExpectSafe(group, *third, r, 1);
    ExpectNan("out", group, r, (*combined)[r].out, 40 * 64, shape.type);
    ExpectNan("assignment_scalars", group, r, (*combined)[r].assignment_scalars, 40 * 4,
              jax_ep::kF32);
    if (r == missing || !group->ranks[r].record->posted) continue;
    ++reports;
    // With several domains a rank may miss one that waits for the missing rank.
    const int peer = options.domain_size == 0 ? missing : group->ranks[r].record->peer;
    ExpectReport(*group, r, peer, jax_ep::Outcome::kTimeout);
    if (peer == r) Fail(jax_ep::Concatenate("rank ", r, " waited for itself"));
    const uint64_t count =
        group->ranks[r].record->sequence % (uint64_t{1} << jax_ep::kGenerationShift);
    if (count != 2) Fail("the report's sequence is not 2");
  }
  if (reports == 0) Fail("nobody reported the missing peer");
  group->NewGeneration();
  calls.Fill();
  calls.LaunchAll();  // a new generation works again
  calls.Check();
  std::printf("%s missing peer: ended after %.2f s, %d reports\n",
              failures == before ? "PASS" : "FAIL", seconds, reports);
}

// Counts an operation's results.
struct Outcomes {
  const char* operation;
  int whole = 0;
  int safe = 0;

  void Count(bool is_whole) { ++(is_whole ? whole : safe); }
};

// Delays ranks at random, with deadlines so short that any of the waits may time out. A rank's
// results are whole or safe, and nothing hangs.
inline void TestTimeouts(Group* group, const Options& options) {
  if (group->size() == 1) return;
  Random random(options.seed + 450);
  const int before = failures;
  Outcomes dispatches = {"dispatch"};
  Outcomes combines = {"combine"};
  Outcomes redispatched = {"redispatch"};
  int reports[3] = {};  // for each WaitPoint
  for (int round = 0; round < (options.tiny ? 16 : 96); ++round) {
    group->ResetArenas(0x11);
    // From less than the duration of a call to much more, on any machine.
    constexpr int kDoublings[] = {0, 3, 6, 9, 11, 13, 15, 17};
    const uint64_t deadline = uint64_t{20'000} << kDoublings[round / 2 % std::size(kDoublings)];
    // Half of the time the entry wait cannot time out: only ranks that have entered may be late.
    group->progress_deadline_ns = deadline;
    group->entry_deadline_ns = (round / 2 + round / 16) % 2 == 0 ? deadline : 20'000'000'000;
    group->max_delay_ns = std::min<uint64_t>(deadline, 20'000'000);
    group->NewGeneration();
    Sequence calls(group, &random);
    calls.overwrites_operands = true;
    const Shape shape = FaultShape(group->size(), options, round % 2 == 0);
    std::vector<std::shared_ptr<Dispatched>> dispatched;
    for (int i = 0; i < 3; ++i) {
      dispatched.push_back(calls.AddDispatch(shape));
      calls.AddCombine(dispatched.back(), shape);
      calls.AddRedispatch(dispatched.back(), shape);
    }
    calls.Fill();
    calls.LaunchAll();
    group->Synchronize();
    for (const Rank& rank : group->ranks) {
      if (rank.record->posted) ++reports[static_cast<int>(rank.record->wait_point)];
    }
    for (const auto& state : dispatched) {
      for (int r = 0; r < group->size(); ++r) {
        const int status = group->Download<int32_t>(r, state->calls[r].plan.status, 1)[0];
        dispatches.Count(status == 0);
        if (status == 0) {
          CheckDispatch(group, *state, r);
        } else {
          ExpectSafe(group, *state, r, status);
        }
      }
    }
    for (int r = 0; r < group->size(); ++r) {
      for (const auto& is_whole : calls.combined) combines.Count(is_whole(r));
      for (const auto& is_whole : calls.is_whole_of) redispatched.Count(is_whole(r));
    }
  }
  for (const Outcomes& of : {dispatches, combines, redispatched}) {
    if (of.whole > 0 && of.safe > 0) continue;
    Fail(jax_ep::Concatenate(of.whole, " results of ", of.operation, " were whole and ", of.safe,
                             " safe; expected both"));
  }
  // A wait for a credit times out where a wait for a chunk might have.
  if (reports[0] == 0 || reports[1] + reports[2] == 0) Fail("some waits never timed out");
  group->entry_deadline_ns = group->progress_deadline_ns = 20'000'000'000;
  group->max_delay_ns = 0;
  group->NewGeneration();
  std::printf(
      "%s timeouts: whole and safe are %d and %d of dispatch, %d and %d of combine, %d and %d of "
      "redispatch; reports of entry %d, chunk %d, credit %d\n",
      failures == before ? "PASS" : "FAIL", dispatches.whole, dispatches.safe, combines.whole,
      combines.safe, redispatched.whole, redispatched.safe, reports[0], reports[1], reports[2]);
}

// One rank makes another call than the others: at another call site, and perhaps with the
// low-latency kernels where the others use the general ones.
inline void TestMismatch(Group* group, const Options& options, bool allow_low_latency) {
  if (group->size() == 1) return;
  Random random(options.seed + 500);
  const int before = failures;
  for (const bool other_may_be_small : {allow_low_latency, !allow_low_latency}) {
    const int odd = other_may_be_small ? 0 : group->size() - 1;
    group->ResetArenas(0x11);
    group->NewGeneration();
    Sequence calls(group, &random);
    const auto first = calls.AddDispatch(FaultShape(group->size(), options, allow_low_latency));
    const auto other = calls.AddDispatch(FaultShape(group->size(), options, other_may_be_small));
    calls.Fill();
    for (int r = 0; r < group->size(); ++r) calls.Launch(r == odd ? 1 : 0, r);
    group->Synchronize();
    for (int r = 0; r < group->size(); ++r) ExpectSafe(group, r == odd ? *other : *first, r, 2);
  }
  group->NewGeneration();
  std::printf("%s mismatch of calls\n", failures == before ? "PASS" : "FAIL");
}

inline void TestNoWorkspace(Group* group, const Options& options, bool allow_low_latency) {
  Random random(options.seed + 600);
  const int before = failures;
  group->ResetArenas(0x11);
  for (const Rank& rank : group->ranks) {
    const uint64_t none = 0;
    CUDA_OK(cudaSetDevice(rank.device));
    CUDA_OK(cudaMemcpy(&rank.control->workspace_bytes, &none, sizeof none, cudaMemcpyHostToDevice));
    for (auto& peer : rank.control->peers) {
      CUDA_OK(cudaMemcpy(&peer.workspace, &none, sizeof none, cudaMemcpyHostToDevice));
    }
    CUDA_OK(cudaDeviceSynchronize());
  }
  Sequence calls(group, &random);
  const Shape shape = FaultShape(group->size(), options, allow_low_latency);
  const auto dispatched = calls.AddDispatch(shape);
  std::vector<std::shared_ptr<Dispatched>> quantized;
  for (const QuantizedFormat& format : kQuantizedFormats) {
    quantized.push_back(calls.AddDispatch(Quantized(shape, format)));
  }
  calls.Fill();
  calls.LaunchAll();
  group->Synchronize();
  for (int r = 0; r < group->size(); ++r) {
    ExpectSafe(group, *dispatched, r, 3);
    for (const auto& call : quantized) ExpectSafe(group, *call, r, 3);
  }
  group->NewGeneration();
  std::printf("%s released workspace\n", failures == before ? "PASS" : "FAIL");
}

// One rank gets a plan with a status: no rank adds old partial sums or takes old rows, and the next
// calls work, also those that are already enqueued.
inline void TestPoisonedPlan(Group* group, const Options& options, bool allow_low_latency) {
  Random random(options.seed + 700);
  const int before = failures;
  const int last = group->size() - 1;
  for (const int top_k : {4, 1}) {
    group->ResetArenas(0x11);
    Sequence calls(group, &random);
    Shape shape = FaultShape(group->size(), options, allow_low_latency);
    shape.routing.top_k = top_k;
    const auto dispatched = calls.AddDispatch(shape);
    const auto combined = calls.AddCombine(dispatched, shape);
    calls.AddRedispatch(dispatched, top_k == 1 ? Quantized(shape) : shape);
    calls.Fill();
    calls.LaunchAll();
    calls.Check();
    group->Refill(last, dispatched->calls[last].plan.status, std::vector<int32_t>{1});
    for (int call : {1, 2}) {
      for (int r = 0; r <= last; ++r) calls.Launch(call, r);
    }
    group->Synchronize();
    for (int r = 0; r <= last; ++r) {
      ExpectNan("out", group, r, (*combined)[r].out, 40 * 64, shape.type);
      // A redispatch needs no partial sums: peers have whole rows.
      if (calls.is_whole_of[0](r) == (r == last))
        Fail("rows by a plan with a status, or without one");
    }
    calls.Fill();
    for (int call : {1, 2, 1, 2}) {
      for (int r = 0; r <= last; ++r) calls.Launch(call, r);
    }
    calls.LaunchAll();
    calls.Check();
  }
  std::printf("%s plan with a status\n", failures == before ? "PASS" : "FAIL");
}

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_TRANSFER_TRANSFER_FAULTS_H_
