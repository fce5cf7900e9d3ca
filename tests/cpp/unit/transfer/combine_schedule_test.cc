#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "ffi/device/transfer/combine/schedule.h"
#include "tests/cpp/unit/check.h"

namespace jax_ep {
namespace {

constexpr int32_t kMaxTestChunks = 32;
constexpr int32_t kWarps = 3168;

// Every vector of every rank's tokens is sent once, and every vector of this rank's tokens is
// summed once. The number of items that send a token chunk is the schedule's, and all of them
// precede the first item that sums it.
void TestEveryVectorOnce(int32_t row_vectors) {
  for (int32_t num_ranks : {1, 2, 3, 4, 7, 64}) {
    for (int32_t num_tokens : {0, 1, 2, 3, 31, 32, 33, 63, 64, 65, 127, 1000, 4096}) {
      if (num_tokens * num_ranks > 70000) continue;
      const CombineSchedule schedule(num_tokens, num_ranks, row_vectors, kMaxTestChunks, kWarps);
      CHECK(schedule.num_chunks() <= kMaxTestChunks);
      const int32_t rank = num_ranks / 2;
      // is_reduce, rank, token, first -> end
      std::map<std::tuple<bool, int32_t, int32_t, int32_t>, int32_t> segments;
      std::map<std::pair<int32_t, int32_t>, int> sends;  // rank, chunk
      std::vector<bool> is_reduced(kMaxTestChunks);
      for (int32_t i = 0; i < schedule.num_items(); ++i) {
        const CombineItem item = schedule.Item(i, rank);
        if (item.token < 0) continue;
        CHECK(0 <= item.chunk && item.chunk < schedule.num_chunks());
        if (item.is_reduce) {
          CHECK(item.rank == rank);
          is_reduced[item.chunk] = true;
          for (int32_t other = 0; other < num_ranks; ++other) {
            const int sent = sends[{other, item.chunk}];
            CHECK(sent == schedule.NumSends(item.chunk));
          }
        } else {
          CHECK(!is_reduced[item.chunk]);
          ++sends[{item.rank, item.chunk}];
        }
        CHECK(item.token < num_tokens);
        CHECK(item.first < item.end || row_vectors == 0);
        const bool is_new =
            segments
                .emplace(std::tuple(item.is_reduce, item.rank, item.token, item.first), item.end)
                .second;
        CHECK(is_new);
      }
      // Sorted, the segments of a row follow each other from its beginning to its end.
      int rows = 0;
      int32_t end = row_vectors;
      for (const auto& [key, segment_end] : segments) {
        CHECK(std::get<3>(key) == (end == row_vectors ? 0 : end));
        end = segment_end;
        if (end == row_vectors) ++rows;
      }
      CHECK(end == row_vectors);
      CHECK(rows == num_tokens * (num_ranks + 1));
    }
  }
}

int CountSegments(int32_t num_tokens, bool is_reduce, int32_t num_warps = kWarps) {
  const CombineSchedule schedule(num_tokens, 4, 896, kMaxTestChunks, num_warps);
  int count = 0;
  for (int32_t i = 0; i < schedule.num_items(); ++i) {
    const CombineItem item = schedule.Item(i, 0);
    if (item.token == 0 && item.rank == 0 && item.is_reduce == is_reduce) ++count;
  }
  return count;
}

// Rows have many segments where there are few; sums have some, if there are warps for them.
void TestSegments() {
  CHECK(CountSegments(1, false) == 14);
  CHECK(CountSegments(1, true) == 14);
  CHECK(CountSegments(4096, false) == 1);
  CHECK(CountSegments(4096, true) == 4);
  CHECK(CountSegments(512, true) == 7);
  CHECK(CountSegments(4096, true, 576) == 1);
}

// A token is in the same chunk for its sender and its receiver.
void TestChunksAgree() {
  const CombineSchedule schedule(1000, 4, 64, kMaxTestChunks, kWarps);
  std::map<int32_t, int32_t> chunk_of;
  for (int32_t rank = 0; rank < 4; ++rank) {
    for (int32_t i = 0; i < schedule.num_items(); ++i) {
      const CombineItem item = schedule.Item(i, rank);
      if (item.token < 0) continue;
      const auto [found, is_new] = chunk_of.emplace(item.token, item.chunk);
      CHECK(found->second == item.chunk);
    }
  }
}

}  // namespace
}  // namespace jax_ep

int main() {
  for (int32_t row_vectors : {0, 1, 63, 64, 65, 130, 896, 1000})
    jax_ep::TestEveryVectorOnce(row_vectors);
  jax_ep::TestSegments();
  jax_ep::TestChunksAgree();
  return jax_ep::testing::Finish();
}
