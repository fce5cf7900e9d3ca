#include "ffi/device/transfer/copy_pipeline.h"

#include <cstdint>

#include "tests/cpp/unit/check.h"

namespace jax_ep {
namespace {

constexpr int32_t kBytes = 216 * 1024;
constexpr int32_t kWarps = 8;

void TestFits() {
  for (int64_t chunks = 0; chunks < 20000; chunks += chunks / 7 + 1) {
    const CopyPipeline ring = PlanCopyPipeline(chunks, 8, kWarps, kBytes);
    CHECK(1 <= ring.num_warps && ring.num_warps <= kWarps);
    CHECK(3 <= ring.num_stages && ring.num_stages <= kMaxCopyStages);
    CHECK(ring.num_warps * CopyPipelineBytes(ring) <= kBytes);
    CHECK(ring.stage_vectors >= 1 && ring.stage_vectors <= 512);
    // Rows that need several stages are split into nearly equal segments.
    const int64_t parts = (chunks + ring.stage_vectors - 1) / ring.stage_vectors;
    if (chunks > 0) CHECK(parts == (chunks + 511) / 512);
  }
}

// Rows of 14 KB and of 4 KB have enough bytes in flight for all links.
void TestSizes() {
  CHECK(PlanCopyPipeline(896, 8, kWarps, kBytes).num_warps == 8);
  CHECK(PlanCopyPipeline(896, 8, kWarps, kBytes).num_stages == 3);
  CHECK(PlanCopyPipeline(256, 8, kWarps, kBytes).num_warps == 8);
  CHECK(PlanCopyPipeline(256, 8, kWarps, kBytes).num_stages == 6);
}

// One row at a time: all warps have stages of a quarter row if they fit, else fewer warps or bytes.
void TestSendRings() {
  CHECK(PlanSendPipeline(896, 8, 1, 54 * 1024).stage_vectors == 224);
  CHECK(PlanSendPipeline(896, 8, 4, 54 * 1024).stage_vectors == 224);
  CHECK(PlanSendPipeline(896, 8, 4, 54 * 1024).num_warps == 4);
  CHECK(PlanSendPipeline(896, 8, 4, 40 * 1024).num_warps == 4);
  CHECK(PlanSendPipeline(896, 8, 4, 16 * 1024).num_warps == 1);
  CHECK(PlanSendPipeline(256, 8, 3, 54 * 1024).stage_vectors == 192);
  CHECK(PlanSendPipeline(7, 8, 4, 54 * 1024).stage_vectors == 7);
  CHECK(PlanSendPipeline(896, 8, 0, 54 * 1024).num_warps == 0);
  for (int64_t chunks = 1; chunks < 1 << 30; chunks += chunks / 7 + 1) {
    for (const int32_t bytes : {2 * 1024, 24 * 1024, 54 * 1024}) {
      const CopyPipeline ring = PlanSendPipeline(chunks, 64, 4, bytes);
      CHECK(ring.num_warps >= 1 && ring.num_stages == 3 && ring.stage_vectors >= 1);
      CHECK(ring.stage_vectors <= chunks);
      CHECK(ring.num_warps * CopyPipelineBytes(ring) <= bytes);
    }
  }
}

// Leaves room for the quotas of many experts, on a GPU with 99 KB of shared memory.
void TestLittleMemory() {
  for (const int32_t bytes : {8 * 1024, 24 * 1024, 60 * 1024}) {
    for (const int64_t chunks : {1, 256, 896, 1024, 5000}) {
      for (const int32_t places : {1, 8, 64}) {
        const CopyPipeline ring = PlanCopyPipeline(chunks, places, kWarps, bytes);
        CHECK(ring.num_warps >= 1 && ring.num_stages >= 3 && ring.stage_vectors >= 1);
        CHECK(ring.num_warps * CopyPipelineBytes(ring) <= bytes);
      }
    }
  }
}

void TestWithoutStages() { CHECK(CopyPipelineBytes({0, 8, 0, 0, 0}) == 0); }

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::TestFits();
  jax_ep::TestSizes();
  jax_ep::TestSendRings();
  jax_ep::TestLittleMemory();
  jax_ep::TestWithoutStages();
  return jax_ep::testing::Finish();
}
