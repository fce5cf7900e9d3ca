#include "ffi/device/transfer/combine_schedule.h"

#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "tests/cpp/unit/check.h"

namespace jax_ep {
namespace {

constexpr int32_t kMostChunks = 32;
constexpr int32_t kWarps = 3168;

// Every vector of every rank's tokens is sent once, and every vector of this rank's tokens is
// summed once. The number of items that send a token chunk is the schedule's, and all of them
// precede the first item that sums it.
void TestAllChunksOnce(int32_t row_vectors) {
  for (int32_t num_ranks : {1, 2, 3, 4, 7, 64}) {
    for (int32_t num_tokens : {0, 1, 2, 3, 31, 32, 33, 63, 64, 65, 127, 1000, 4096}) {
      if (num_tokens * num_ranks > 70000) continue;
      const CombineSchedule tickets(num_tokens, num_ranks, row_vectors, kMostChunks, kWarps);
      CHECK(tickets.num_chunks() <= kMostChunks);
      const int32_t rank = num_ranks / 2;
      // sum?, rank, token, first: end
      std::map<std::tuple<bool, int32_t, int32_t, int32_t>, int32_t> pieces;
      std::map<std::pair<int32_t, int32_t>, int> sends;  // rank, chunk
      std::vector<bool> is_summed(kMostChunks);
      for (int32_t i = 0; i < tickets.Count(); ++i) {
        const CombineItem ticket = tickets.At(i, rank);
        if (ticket.token < 0) continue;
        CHECK(0 <= ticket.chunk && ticket.chunk < tickets.num_chunks());
        if (ticket.is_sum) {
          CHECK(ticket.rank == rank);
          is_summed[ticket.chunk] = true;
          for (int32_t other = 0; other < num_ranks; ++other) {
            const int sent = sends[{other, ticket.chunk}];
            CHECK(sent == tickets.TicketsOf(ticket.chunk));
          }
        } else {
          CHECK(!is_summed[ticket.chunk]);
          ++sends[{ticket.rank, ticket.chunk}];
        }
        CHECK(ticket.token < num_tokens);
        CHECK(ticket.first < ticket.end || row_vectors == 0);
        const bool is_new =
            pieces
                .emplace(std::tuple(ticket.is_sum, ticket.rank, ticket.token, ticket.first),
                         ticket.end)
                .second;
        CHECK(is_new);
      }
      // Sorted, the segments of a row follow each other from its beginning to its end.
      int rows = 0;
      int32_t end = row_vectors;
      for (const auto& [key, end_of_piece] : pieces) {
        CHECK(std::get<3>(key) == (end == row_vectors ? 0 : end));
        end = end_of_piece;
        if (end == row_vectors) ++rows;
      }
      CHECK(end == row_vectors);
      CHECK(rows == num_tokens * (num_ranks + 1));
    }
  }
}

int CountPieces(int32_t num_tokens, bool of_sums, int32_t num_warps = kWarps) {
  const CombineSchedule tickets(num_tokens, 4, 896, kMostChunks, num_warps);
  int count = 0;
  for (int32_t i = 0; i < tickets.Count(); ++i) {
    const CombineItem ticket = tickets.At(i, 0);
    if (ticket.token == 0 && ticket.rank == 0 && ticket.is_sum == of_sums) ++count;
  }
  return count;
}

// Rows have many segments where there are few; sums have some, if there are warps for them.
void TestPieces() {
  CHECK(CountPieces(1, false) == 14);
  CHECK(CountPieces(1, true) == 14);
  CHECK(CountPieces(4096, false) == 1);
  CHECK(CountPieces(4096, true) == 4);
  CHECK(CountPieces(512, true) == 7);
  CHECK(CountPieces(4096, true, 576) == 1);
}

// A token is in the same chunk for its sender and its receiver.
void TestChunksAgree() {
  const CombineSchedule tickets(1000, 4, 64, kMostChunks, kWarps);
  std::map<int32_t, int32_t> chunk_of;
  for (int32_t rank = 0; rank < 4; ++rank) {
    for (int32_t i = 0; i < tickets.Count(); ++i) {
      const CombineItem ticket = tickets.At(i, rank);
      if (ticket.token < 0) continue;
      const auto [found, is_new] = chunk_of.emplace(ticket.token, ticket.chunk);
      CHECK(found->second == ticket.chunk);
    }
  }
}

}  // namespace
}  // namespace jax_ep

int main() {
  for (int32_t row_vectors : {0, 1, 63, 64, 65, 130, 896, 1000})
    jax_ep::TestAllChunksOnce(row_vectors);
  jax_ep::TestPieces();
  jax_ep::TestChunksAgree();
  return jax_ep::testing::Finish();
}
