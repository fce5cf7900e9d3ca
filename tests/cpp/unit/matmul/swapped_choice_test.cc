#include "ffi/kernels/matmul/sm90/swapped_choice.h"

#include "tests/cpp/unit/check.h"

namespace jax_ep {
namespace {

constexpr int kH100 = 5120;
constexpr int kH200 = 6144;

struct Choice {
  bool has_few_tiles, has_few_rows, takes_wide_pairs, takes_wide_pairs_on_h100;
};

void Check(const SwappedCall& call, const Choice& expected) {
  CHECK(call.HasFewTiles() == expected.has_few_tiles);
  CHECK(call.HasFewRows() == expected.has_few_rows);
  CHECK(call.TakesWidePairs(kH200) == expected.takes_wide_pairs);
  CHECK(call.TakesWidePairs(kH100) == expected.takes_wide_pairs_on_h100);
}

// Models on one GPU or four, each with 132 SMs.
void TestModels() {
  // Mixtral, 2 of 8 experts: 64 tokens on four ranks, up (SwiGLU, 14336) and down (4096); 16
  // tokens.
  Check({2, 512, 224, 66}, {false, false, true, false});
  Check({2, 512, 32, 66}, {true, false, true, true});
  Check({2, 128, 32, 66}, {true, true, false, false});
  // DeepSeek-V3, 1024 tokens; one token. gpt-oss, 1024 tokens, down: 23 tiles.
  Check({64, 8192, 32, 66}, {false, false, true, false});
  Check({64, 64, 32, 66}, {false, true, false, false});
  Check({32, 4096, 23, 66}, {false, false, true, false});
  // Qwen3-30B, 512 tokens, up: three waves of pairs would be two of twice as long ones.
  Check({32, 4096, 12, 66}, {false, false, false, false});
}

void TestBounds() {
  Check({1, 64, 1, 1}, {true, true, false, false});
  Check({1, 65, 1, 1}, {true, false, true, true});
  Check({1, 65, 2, 1}, {false, false, false, false});
  Check({1, 65, 3, 1}, {false, false, true, false});
  // The most groups, rows and tiles: no product overflows.
  constexpr int64_t kMost = int64_t{1} << 30;
  Check({kMost, kMost, kMost / 64, 1}, {false, true, false, false});
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::TestModels();
  jax_ep::TestBounds();
  return jax_ep::testing::Finish();
}
