#include "ffi/runtime/groups/failure.h"

#include "tests/cpp/unit/check.h"

namespace jax_ep {
namespace {

AbortRecord Record(Outcome outcome, WaitPoint wait_point) {
  return {.posted = 1,
          .rank = 3,
          .peer = 1,
          .operation = Operation::kRedispatch,
          .wait_point = wait_point,
          .outcome = outcome,
          .sequence = 12,
          .generation = 2};
}

void TestWords() {
  const AbortRecord late = Record(Outcome::kTimeout, WaitPoint::kEntry);
  CHECK_FAILS(
      Describe(late),
      "rank 3 waited for rank 1 in redispatch.entry (sequence number 12) until the deadline");
  CHECK((ToReport(late) == TimeoutReport{3, 1, "redispatch.entry", 12}));
  CHECK(ToReport(Record(Outcome::kTimeout, WaitPoint::kChunk)).phase == "redispatch.progress");
  const AbortRecord other = Record(Outcome::kMismatch, WaitPoint::kEntry);
  CHECK_FAILS(Describe(other), "while rank 1 runs another call");
  CHECK(ToReport(other).phase == "redispatch.mismatch");
  const AbortRecord released = Record(Outcome::kNoWorkspace, WaitPoint::kEntry);
  CHECK_FAILS(Describe(released), "rank 3 has no workspace for redispatch");
  CHECK(ToReport(released).phase == "redispatch.workspace");
  CHECK(testing::Contains(DescribeWaiting(late, 30),
                          "rank 3 has waited 30 s for rank 1 in redispatch.entry"));
  CHECK_FAILS(Describe(late), "jax_ep.release() on every rank");
  const AbortRecord second = Record(Outcome::kConcurrent, WaitPoint::kEntry);
  CHECK_FAILS(Describe(second), "rank 3 began redispatch (sequence number 12) while another call");
  CHECK(ToReport(second).phase == "redispatch.concurrent");
  CHECK_FAILS(DescribeHostAbort("no luck"), "of this generation: no luck. Every later call");
  AbortRecord third = late;
  third.sequence += uint64_t{7} << kGenerationShift;
  CHECK(ToReport(third) == ToReport(late));
}

void TestPosted() {
  AbortRecord record = Record(Outcome::kTimeout, WaitPoint::kEntry);
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
