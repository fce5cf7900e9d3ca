#include "ffi/device/combine_tickets.h"

#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "tests/ffi/check.h"

namespace jax_ep {
namespace {

constexpr int32_t kMostChunks = 32;

// Every piece of every rank's tokens is sent once, and every one of this rank's added up once; each
// chunk is sent by as many tickets as TicketsOf says, all of them before the first that adds it up.
void TestAllPiecesOnce(int32_t row_chunks) {
  for (int32_t num_ranks : {1, 2, 3, 4, 7, 64}) {
    for (int32_t num_tokens : {0, 1, 2, 3, 31, 32, 33, 63, 64, 65, 127, 1000, 4096}) {
      if (num_tokens * num_ranks > 70000) continue;
      const CombineTickets tickets(num_tokens, num_ranks, row_chunks, kMostChunks);
      CHECK(tickets.num_chunks() <= kMostChunks);
      const int32_t rank = num_ranks / 2;
      std::map<std::tuple<bool, int32_t, int32_t, int32_t>, int> times;  // sum?, rank, token, piece
      std::map<std::pair<int32_t, int32_t>, int> sends;                  // rank, chunk
      std::vector<bool> is_summed(kMostChunks);
      for (int32_t i = 0; i < tickets.Count(); ++i) {
        const CombineTicket ticket = tickets.At(i, rank);
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
        ++times[{ticket.is_sum, ticket.rank, ticket.token, ticket.piece}];
      }
      CHECK(times.size() == size_t(num_tokens) * (num_ranks + 1) * tickets.num_pieces());
      for (const auto& [key, count] : times) {
        CHECK(count == 1);
        CHECK(std::get<2>(key) < num_tokens);
      }
    }
  }
}

// Pieces follow each other from a row's beginning to its end; few tokens have many.
void TestPieces() {
  for (int32_t row_chunks : {0, 1, 63, 64, 65, 896, 1000}) {
    for (int32_t num_tokens : {1, 128, 512, 4096}) {
      const CombineTickets tickets(num_tokens, 4, row_chunks, kMostChunks);
      int32_t end = 0;
      for (int32_t piece = 0; piece < tickets.num_pieces(); ++piece) {
        CHECK(tickets.FirstOf(piece) == end);
        CHECK(tickets.EndOf(piece) > end || row_chunks == 0);
        end = tickets.EndOf(piece);
      }
      CHECK(end == row_chunks);
    }
  }
  CHECK(CombineTickets(1, 4, 896, kMostChunks).num_pieces() == 14);
  CHECK(CombineTickets(4096, 4, 896, kMostChunks).num_pieces() == 1);
}

// A token is in the same chunk for its sender and for its rank.
void TestChunksAgree() {
  const CombineTickets tickets(1000, 4, 64, kMostChunks);
  std::map<int32_t, int32_t> chunk_of;
  for (int32_t rank = 0; rank < 4; ++rank) {
    for (int32_t i = 0; i < tickets.Count(); ++i) {
      const CombineTicket ticket = tickets.At(i, rank);
      if (ticket.token < 0) continue;
      const auto [found, is_new] = chunk_of.emplace(ticket.token, ticket.chunk);
      CHECK(found->second == ticket.chunk);
    }
  }
}

}  // namespace
}  // namespace jax_ep

int main() {
  for (int32_t row_chunks : {0, 1, 130, 896}) jax_ep::TestAllPiecesOnce(row_chunks);
  jax_ep::TestPieces();
  jax_ep::TestChunksAgree();
  return jax_ep::testing::Finish();
}
