#include <cstdint>

#include "ffi/device/transfer/low_latency/layout.h"
#include "tests/cpp/unit/check.h"

namespace jax_ep {
namespace {

void TestPiecesCoverARowOnce() {
  for (const int64_t ranks : {1, 2, 3, 4, 8, 64}) {
    for (const int64_t tokens : {1, 2, 7, 31, 128}) {
      for (const int64_t chunks : {1, 2, 63, 64, 65, 448, 896, 4096}) {
        const RowSegments pieces = PlanRowSegments(ranks, tokens, 8, chunks);
        if (pieces.count() == 0) continue;
        int32_t end = 0;
        for (int32_t piece = 0; piece < pieces.count(); ++piece) {
          CHECK(pieces.FirstOf(piece) == end);
          end = pieces.EndOf(piece, static_cast<int32_t>(chunks));
          CHECK(end > pieces.FirstOf(piece));
          CHECK(end - pieces.FirstOf(piece) <= kMaxSegmentVectors);
        }
        CHECK(end == chunks);
        CHECK(ranks * tokens * pieces.count() <= kMaxLowLatencySegments);
      }
    }
  }
}

void TestWhatIsSmall() {
  constexpr int64_t kChunks = 7168 * 2 / 16;
  CHECK(PlanRowSegments(4, 1, 8, kChunks).count() == 14);  // 64 vectors each
  CHECK(PlanRowSegments(4, 128, 8, kChunks).count() == 8);
  CHECK(PlanRowSegments(4, 146, 8, kChunks).count() > 0);
  CHECK(PlanRowSegments(4, 147, 8, kChunks).count() == 0);      // more than 8 MiB of rows
  CHECK(PlanRowSegments(4, 257, 8, 1).count() == 0);            // more than 8192 assignments
  CHECK(PlanRowSegments(4, 1, 33, kChunks).count() == 0);       // more assignments than lanes
  CHECK(PlanRowSegments(64, 129, 1, 1).count() == 0);           // more than 8192 flags
  CHECK(PlanRowSegments(4, 0, 8, kChunks).count() == 0);        // nothing to send
  CHECK(PlanRowSegments(1 << 20, 1 << 20, 8, 1).count() == 0);  // far too much
}

void TestRangesCoverTheAssignments() {
  for (const int64_t ranks : {1, 2, 3, 4, 7, 8, 9, 64}) {
    for (const int64_t choices : {1, 31, 32, 33, 100, 1024, 8192}) {
      const AssignmentRanges ranges = PlanAssignmentRanges(ranks, choices);
      CHECK(1 <= ranges.count && ranges.count <= kCountingWarps);
      CHECK(ranges.count * ranks <= kCountingWarps || ranges.count == 1);
      CHECK(int64_t{ranges.count} << ranges.log2_assignments >= choices);
      CHECK(ranges.log2_assignments >= 5);
    }
  }
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::TestPiecesCoverARowOnce();
  jax_ep::TestWhatIsSmall();
  jax_ep::TestRangesCoverTheAssignments();
  return jax_ep::testing::Finish();
}
