#include "ffi/device/transfer/dispatch/copy_pipeline.h"

#include <cstdint>

#include "tests/cpp/unit/check.h"

namespace jax_ep {
namespace {

constexpr int32_t kBytes = 216 * 1024;
constexpr int32_t kWarps = 8;

void TestFits() {
  for (int64_t vectors = 0; vectors < 20000; vectors += vectors / 7 + 1) {
    const CopyPipeline pipeline = PlanCopyPipeline(vectors, 8, kWarps, kBytes);
    CHECK(1 <= pipeline.num_warps && pipeline.num_warps <= kWarps);
    CHECK(3 <= pipeline.num_stages && pipeline.num_stages <= kMaxCopyStages);
    CHECK(pipeline.num_warps * CopyPipelineBytes(pipeline) <= kBytes);
    CHECK(pipeline.stage_vectors >= 1 && pipeline.stage_vectors <= 512);
    // Rows that need several stages are split into nearly equal segments.
    const int64_t segments = (vectors + pipeline.stage_vectors - 1) / pipeline.stage_vectors;
    if (vectors > 0) CHECK(segments == (vectors + 511) / 512);
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
void TestSendPipelines() {
  CHECK(PlanSendPipeline(896, 8, 1, 54 * 1024).stage_vectors == 224);
  CHECK(PlanSendPipeline(896, 8, 4, 54 * 1024).stage_vectors == 224);
  CHECK(PlanSendPipeline(896, 8, 4, 54 * 1024).num_warps == 4);
  CHECK(PlanSendPipeline(896, 8, 4, 40 * 1024).num_warps == 4);
  CHECK(PlanSendPipeline(896, 8, 4, 16 * 1024).num_warps == 1);
  CHECK(PlanSendPipeline(256, 8, 3, 54 * 1024).stage_vectors == 192);
  CHECK(PlanSendPipeline(7, 8, 4, 54 * 1024).stage_vectors == 7);
  CHECK(PlanSendPipeline(896, 8, 0, 54 * 1024).num_warps == 0);
  for (int64_t vectors = 1; vectors < 1 << 30; vectors += vectors / 7 + 1) {
    for (const int32_t bytes : {2 * 1024, 24 * 1024, 54 * 1024}) {
      const CopyPipeline pipeline = PlanSendPipeline(vectors, 64, 4, bytes);
      CHECK(pipeline.num_warps >= 1 && pipeline.num_stages == 3 && pipeline.stage_vectors >= 1);
      CHECK(pipeline.stage_vectors <= vectors);
      CHECK(pipeline.num_warps * CopyPipelineBytes(pipeline) <= bytes);
    }
  }
}

// Leaves room for the quotas of many experts, on a GPU with 99 KB of shared memory.
void TestLittleMemory() {
  for (const int32_t bytes : {8 * 1024, 24 * 1024, 60 * 1024}) {
    for (const int64_t vectors : {1, 256, 896, 1024, 5000}) {
      for (const int32_t destinations : {1, 8, 64}) {
        const CopyPipeline pipeline = PlanCopyPipeline(vectors, destinations, kWarps, bytes);
        CHECK(pipeline.num_warps >= 1 && pipeline.num_stages >= 3 && pipeline.stage_vectors >= 1);
        CHECK(pipeline.num_warps * CopyPipelineBytes(pipeline) <= bytes);
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
  jax_ep::TestSendPipelines();
  jax_ep::TestLittleMemory();
  jax_ep::TestWithoutStages();
  return jax_ep::testing::Finish();
}
