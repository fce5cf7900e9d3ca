#include "ffi/runtime/failure.h"

#include "tests/cpp/unit/check.h"

namespace jax_ep {
namespace {

AbortRecord Record(Outcome outcome, Gate gate) {
  return {.posted = 1,
          .rank = 3,
          .peer = 1,
          .operation = Operation::kDispatchByPlan,
          .gate = gate,
          .outcome = outcome,
          .epoch = 12,
          .generation = 2};
}

void TestWords() {
  const AbortRecord late = Record(Outcome::kTimeout, Gate::kReady);
  CHECK_FAILS(Describe(late),
              "rank 3 waited for rank 1 in dispatch_by_plan.entry (epoch 12) until the deadline");
  CHECK((ToReport(late) == TimeoutReport{3, 1, "dispatch_by_plan.entry", 12}));
  CHECK(ToReport(Record(Outcome::kTimeout, Gate::kChunk)).phase == "dispatch_by_plan.progress");
  const AbortRecord other = Record(Outcome::kMismatch, Gate::kReady);
  CHECK_FAILS(Describe(other), "while rank 1 runs another call");
  CHECK(ToReport(other).phase == "dispatch_by_plan.mismatch");
  const AbortRecord released = Record(Outcome::kNoWorkspace, Gate::kReady);
  CHECK_FAILS(Describe(released), "rank 3 has no workspace for dispatch_by_plan");
  CHECK(ToReport(released).phase == "dispatch_by_plan.workspace");
  CHECK(testing::Contains(DescribeWaiting(late, 30),
                          "rank 3 has waited 30 s for rank 1 in dispatch_by_plan.entry"));
  CHECK_FAILS(Describe(late), "jax_ep.release() on every rank");
}

void TestPosted() {
  AbortRecord record = Record(Outcome::kTimeout, Gate::kReady);
  CHECK(IsPosted(record));
  record.posted = 0;
  CHECK(!IsPosted(record));
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::TestWords();
  jax_ep::TestPosted();
  return jax_ep::testing::Finish();
}
