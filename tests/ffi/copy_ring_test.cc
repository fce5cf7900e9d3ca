#include "ffi/device/copy_ring.h"

#include <cstdint>

#include "tests/ffi/check.h"

namespace jax_ep {
namespace {

constexpr int32_t kBytes = 216 * 1024;
constexpr int32_t kWarps = 8;

void TestFits() {
  for (int64_t chunks = 0; chunks < 20000; chunks += chunks / 7 + 1) {
    const CopyRing ring = PlanCopyRing(chunks, 8, kWarps, kBytes);
    CHECK(1 <= ring.num_warps && ring.num_warps <= kWarps);
    CHECK(3 <= ring.num_stages && ring.num_stages <= kMaxCopyStages);
    CHECK(ring.num_warps * CopyRingBytes(ring) <= kBytes);
    CHECK(ring.stage_chunks >= 1 && ring.stage_chunks <= 1024);
    // Rows that need more than one stage are cut into nearly equal parts.
    const int64_t parts = (chunks + ring.stage_chunks - 1) / ring.stage_chunks;
    if (chunks > 0) CHECK(parts == (chunks + 1023) / 1024);
  }
}

// Enough on its way for all links: of rows of 14 KB and of 4 KB.
void TestSizes() {
  CHECK(PlanCopyRing(896, 8, kWarps, kBytes).num_warps == 5);
  CHECK(PlanCopyRing(896, 8, kWarps, kBytes).num_stages == 3);
  CHECK(PlanCopyRing(256, 8, kWarps, kBytes).num_warps == 8);
  CHECK(PlanCopyRing(256, 8, kWarps, kBytes).num_stages == 6);
}

// Beside the quotas of many experts, on a GPU with 99 KB.
void TestLittleMemory() {
  for (const int32_t bytes : {8 * 1024, 24 * 1024, 60 * 1024}) {
    for (const int64_t chunks : {1, 256, 896, 1024, 5000}) {
      for (const int32_t places : {1, 8, 64}) {
        const CopyRing ring = PlanCopyRing(chunks, places, kWarps, bytes);
        CHECK(ring.num_warps >= 1 && ring.num_stages >= 3 && ring.stage_chunks >= 1);
        CHECK(ring.num_warps * CopyRingBytes(ring) <= bytes);
      }
    }
  }
}

void TestWithoutStages() { CHECK(CopyRingBytes({0, 8, 0, 0, 0}) == 0); }

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::TestFits();
  jax_ep::TestSizes();
  jax_ep::TestLittleMemory();
  jax_ep::TestWithoutStages();
  return jax_ep::testing::Finish();
}
