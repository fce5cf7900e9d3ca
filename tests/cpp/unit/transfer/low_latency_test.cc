#include <cstdint>

#include "ffi/device/transfer/low_latency/layout.h"
#include "ffi/runtime/calls/transfer_shape.h"
#include "tests/cpp/unit/check.h"

namespace jax_ep {
namespace {

void TestSegmentsCoverARowOnce() {
  for (const int64_t ranks : {1, 2, 3, 4, 8, 64}) {
    for (const int64_t tokens : {1, 2, 7, 31, 128}) {
      for (const int64_t vectors : {1, 2, 63, 64, 65, 448, 896, 4096}) {
        const RowSegments segments = PlanRowSegments(ranks, tokens, 8, vectors);
        if (segments.count() == 0) continue;
        int32_t end = 0;
        for (int32_t segment = 0; segment < segments.count(); ++segment) {
          CHECK(segments.First(segment) == end);
          end = segments.End(segment, static_cast<int32_t>(vectors));
          CHECK(end > segments.First(segment));
          CHECK(end - segments.First(segment) <= kMaxSegmentVectors);
        }
        CHECK(end == vectors);
        CHECK(ranks * tokens * segments.count() <= kMaxLowLatencySegments);
      }
    }
  }
}

void TestSegmentsShareScales() {
  constexpr RowFormat kFormats[] = {
      QuantizedRowFormat(kF8E4M3, 128), QuantizedRowFormat(kF8E4M3, 16384),
      QuantizedRowFormat(kF8E4M3, 32, kF8E8M0), QuantizedRowFormat(kF4E2M1, 32, kF8E8M0),
      QuantizedRowFormat(kF4E2M1, 16, kF8E4M3)};
  for (const int64_t tokens : {1, 7, 128, 512, 2048}) {
    for (const int64_t hidden : {32, 288, 768, 2880, 2912, 4096, 7168, 16384}) {
      for (const RowFormat& format : kFormats) {
        const TransferShape shape = {.hidden = hidden, .format = format};
        const auto words = static_cast<int32_t>(shape.num_scale_words());
        const RowSegments segments =
            PlanRowSegments(4, tokens, 1, shape.operand_bytes() / kVectorBytes, words);
        if (segments.count() == 0) continue;
        int32_t end = 0;
        for (int32_t segment = 0; segment < segments.count(); ++segment) {
          const int32_t first = segments.FirstScaleWord(segment);
          const int32_t segment_end = segments.EndScaleWord(segment, words);
          CHECK(segment_end - first <= kMaxSegmentScaleWords);
          if (segment_end <= first) continue;
          CHECK(first == end);
          end = segment_end;
        }
        CHECK(end == words);
      }
    }
  }
}

void TestLowLatencyLimits() {
  constexpr int64_t kVectors = 7168 * 2 / 16;
  CHECK(PlanRowSegments(4, 1, 8, kVectors).count() == 14);  // 64 vectors each
  CHECK(PlanRowSegments(4, 128, 8, kVectors).count() == 8);
  CHECK(PlanRowSegments(4, 146, 8, kVectors).count() > 0);
  CHECK(PlanRowSegments(4, 147, 8, kVectors).count() == 0);     // more than 8 MiB of rows
  CHECK(PlanRowSegments(4, 257, 8, 1).count() == 0);            // more than 8192 assignments
  CHECK(PlanRowSegments(4, 1, 33, kVectors).count() == 0);      // more assignments than lanes
  CHECK(PlanRowSegments(64, 129, 1, 1).count() == 0);           // more than 8192 flags
  CHECK(PlanRowSegments(4, 0, 8, kVectors).count() == 0);       // nothing to send
  CHECK(PlanRowSegments(1 << 20, 1 << 20, 8, 1).count() == 0);  // far too much
}

void TestRangesCoverTheAssignments() {
  for (const int64_t ranks : {1, 2, 3, 4, 7, 8, 9, 64}) {
    for (const int64_t assignments : {1, 31, 32, 33, 100, 1024, 8192}) {
      const AssignmentRanges ranges = PlanAssignmentRanges(ranks, assignments);
      CHECK(1 <= ranges.count && ranges.count <= kCountingWarps);
      CHECK(ranges.count * ranks <= kCountingWarps || ranges.count == 1);
      CHECK(int64_t{ranges.count} << ranges.log2_assignments >= assignments);
      CHECK(ranges.log2_assignments >= 5);
    }
  }
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::TestSegmentsCoverARowOnce();
  jax_ep::TestSegmentsShareScales();
  jax_ep::TestLowLatencyLimits();
  jax_ep::TestRangesCoverTheAssignments();
  return jax_ep::testing::Finish();
}
