#include "ffi/device/transfer/dispatch/token_chunks.h"

#include <algorithm>

#include "tests/cpp/unit/check.h"

namespace jax_ep {
namespace {

constexpr int64_t kRowBytes = 7168 * 2;
constexpr int64_t kFloor = int64_t{128} << 20;

void TestAllTokensHavePlacesWhereACombineHasAsMany() {
  const TokenChunks chunks = PlanTokenChunks(4096, kRowBytes, 4, 8);
  CHECK(chunks.tokens == 128 && chunks.num_chunks == 32);
  CHECK(chunks.ring_chunks == 32 && chunks.ring_slots == 4096);
}

void TestAWindowOfThem() {
  const TokenChunks few_choices = PlanTokenChunks(8192, kRowBytes, 4, 2);
  CHECK(few_choices.ring_chunks == 21 && few_choices.ring_slots == 21 * 256);
  const TokenChunks many_ranks = PlanTokenChunks(4096, kRowBytes, 64, 8);
  CHECK(many_ranks.ring_chunks == 4 && many_ranks.ring_slots == 4 * 128);
  const TokenChunks less = PlanTokenChunks(4096, kRowBytes, 4, 8, 3);
  CHECK(less.ring_chunks == 3 && less.ring_slots == 3 * 128);
}

void TestLessThanOneChunk() {
  CHECK(PlanTokenChunks(0, kRowBytes, 4, 8).num_chunks == 0);
  CHECK(PlanTokenChunks(0, kRowBytes, 4, 8).ring_slots == 0);
  CHECK(PlanTokenChunks(5, kRowBytes, 64, 1).ring_slots == 5);
  CHECK(PlanTokenChunks(512, kRowBytes, 8, 1).ring_slots == 512);  // within the floor
}

// Also for shapes that no kernel takes: jax_ep.memory() accepts them.
void TestEverywhere() {
  for (const int64_t tokens : {1, 2, 15, 16, 17, 31, 33, 100, 4095, 4096, 65536, 2147483647}) {
    for (const int64_t row_bytes : {int64_t{16}, kRowBytes, int64_t{1} << 44}) {
      for (const int64_t ranks : {1, 2, 3, 8, 64}) {
        for (const int64_t top_k : {1, 2, 8, 64}) {
          for (const int64_t most : {1, 5, kMaxChunks}) {
            const TokenChunks chunks = PlanTokenChunks(tokens, row_bytes, ranks, top_k, most);
            CHECK(0 < chunks.num_chunks && chunks.num_chunks <= kMaxChunks);
            CHECK(int64_t{chunks.tokens} * chunks.num_chunks >= tokens);
            CHECK(int64_t{chunks.tokens} * (chunks.num_chunks - 1) < tokens);
            CHECK(0 < chunks.ring_chunks && chunks.ring_chunks <= most);
            CHECK(chunks.ring_slots ==
                  std::min(int64_t{chunks.tokens} * chunks.ring_chunks, tokens));
            const int64_t rows = std::max(tokens * std::min(top_k, ranks), kFloor / row_bytes);
            CHECK(chunks.ring_chunks <= 4 || (ranks - 1) * chunks.ring_slots <= rows);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::TestAllTokensHavePlacesWhereACombineHasAsMany();
  jax_ep::TestAWindowOfThem();
  jax_ep::TestLessThanOneChunk();
  jax_ep::TestEverywhere();
  return jax_ep::testing::Finish();
}
