#include <algorithm>

#include "ffi/device/transfer/hierarchical/low_latency/layout.h"
#include "tests/cpp/unit/check.h"

namespace jax_ep {
namespace {

constexpr int64_t kRowBytes = 7168 * 2;
constexpr int kMaxDomains = kMaxRailSlots / 2 + 1;

bool IsPowerOfTwo(int64_t value) { return value > 0 && (value & (value - 1)) == 0; }

void TestDomains() {
  for (int size : {1, 2, 3, 8, 36}) {
    for (int count : {2, 3, 5, 8}) {
      const Domains domains(size * count, size);
      CHECK(domains.size == size && domains.count == count && domains.num_rails() == count - 1);
      for (int rank = 0; rank < size * count; ++rank) {
        const int domain = domains.Domain(rank), index = domains.Index(rank);
        CHECK(0 <= index && index < size && domain * size + index == rank);
        CHECK(domains.Rank(domain, index) == rank);
      }
      for (int from = 0; from < count; ++from) {
        CHECK(domains.RailEnd(from, 0) == (from + 1) % count);  // each begins with the next one
        for (int rail = 0; rail < domains.num_rails(); ++rail) {
          const int to = domains.RailEnd(from, rail);
          CHECK(to != from && 0 <= to && to < count && domains.Rail(from, to) == rail);
        }
      }
    }
  }
}

void TestRailSlots() {
  for (int domains = 2; domains <= kMaxDomains; ++domains) {
    const int64_t slots = RailSlots(domains);
    CHECK(IsPowerOfTwo(slots) && slots >= 2);
    CHECK((domains - 1) * slots <= kMaxRailSlots);
    CHECK((domains - 1) * slots * kRailSlotBytes <= kMaxRailBytes);
  }
}

// A slot's numbers rise over its laps, calls and generations, and no number is 0.
void TestChunkNumbersRise() {
  uint64_t last = 0;
  for (uint64_t generation : {uint64_t{1}, uint64_t{2}, kMaxGeneration}) {
    for (uint64_t call = 0; call < 3; ++call) {
      for (int lap = 0; lap < kMaxLaps; ++lap) {
        const uint64_t number = ChunkNumber(FirstSequence(generation) + call, lap);
        CHECK(number > last);
        last = number;
      }
    }
  }
}

// The messages of training are long enough for a network, and there are many.
void TestASizeOfPractice() {
  const HierarchicalLayout layout = PlanHierarchicalLayout(4096, kRowBytes, 8, 256, 16, 8);
  CHECK(layout.chunk_tokens * kRowBytes > 100'000 && layout.num_chunks > 100);
  const int last = layout.num_chunks - 1;
  CHECK(layout.ChunkTokens(0, 4096) == layout.chunk_tokens);
  CHECK(layout.ChunkTokens(last, 4096) == 4096 - last * layout.chunk_tokens);
  CHECK(layout.num_messages() == layout.num_metadata + layout.num_chunks);
}

void TestBoundsOfTests() {
  const HierarchicalLayout layout = PlanHierarchicalLayout(100, 64, 8, 8, 4, 2, 2, 5);
  CHECK(layout.rail_slots == 2 && layout.domain_slots == 4 && layout.num_chunks > 4);
  // So many laps have numbers.
  const HierarchicalLayout long_rows = PlanHierarchicalLayout(8160, 100'000, 8, 8, 4, 2, 2, 1);
  CHECK(long_rows.num_chunks == 4080 && long_rows.domain_slots == 16);
}

void TestNoTokens() {
  const HierarchicalLayout layout = PlanHierarchicalLayout(0, 64, 8, 8, 4, 2);
  CHECK(layout.num_chunks == 0 && layout.num_metadata == 1);  // counts are sent
}

void TestWhatDoesNotFit() {
  CHECK(PlanHierarchicalLayout(1, kRailSlotBytes, 1, 2, 2, 1).chunk_tokens == 0);
  CHECK(PlanHierarchicalLayout(2147483647, kRowBytes, 8, 256, 16, 8).chunk_tokens == 0);
  // The most chunks, and one more.
  const auto plan = [](int64_t chunks) {
    return PlanHierarchicalLayout(chunks, kRowBytes, 8, 256, 16, 8, 0, 0, 1);
  };
  CHECK(plan(kMaxHierarchicalChunks).num_chunks == kMaxHierarchicalChunks);
  CHECK(plan(kMaxHierarchicalChunks + 1).chunk_tokens == 0);
}

void TestEverywhere() {
  for (const int64_t tokens : {0, 1, 2, 127, 128, 129, 4096, 16320}) {
    for (const int64_t row_bytes : {int64_t{16}, kRowBytes, int64_t{100'000}}) {
      for (const int64_t top_k : {1, 8, 64}) {
        for (const int64_t size : {1, 2, 8}) {
          for (const int64_t count : {2, 3, 5, 8}) {
            const int64_t experts = size * count * 4;
            const HierarchicalLayout layout =
                PlanHierarchicalLayout(tokens, row_bytes, top_k, experts, size * count, size);
            const int64_t chunk = layout.chunk_tokens, chunks = layout.num_chunks;
            CHECK(0 < chunk && chunk <= kMaxChunkTokens);
            CHECK(kHeaderBytes + chunk * (row_bytes + top_k * 4) <= kRailSlotBytes);
            CHECK(chunk * chunks >= tokens && chunk * (chunks - 1) < std::max<int64_t>(tokens, 1));
            CHECK(IsPowerOfTwo(layout.domain_slots) && layout.domain_slots <= kMaxDomainSlots);
            CHECK(chunks <= int64_t{layout.domain_slots} * kMaxLaps);
            const int64_t counts = (experts + 2) / 2 * 8;
            CHECK(kHeaderBytes + counts + int64_t{layout.metadata_assignments} * 12 <=
                  kRailSlotBytes);
            CHECK(int64_t{layout.num_metadata} * layout.metadata_assignments >= tokens * top_k);
          }
        }
      }
    }
  }
}

RowSegments Segments(int64_t ranks, int64_t domain_size, int64_t tokens, int64_t top_k,
                     int64_t vectors, int64_t scales = 0) {
  const int64_t row_bytes = 16 * (vectors + (scales + 3) / 4);
  const HierarchicalLayout layout =
      PlanHierarchicalLayout(tokens, row_bytes, top_k, ranks, ranks, domain_size);
  return PlanHierarchicalSegments(layout, ranks, tokens, top_k, vectors, scales);
}

// Stores that do not wait have room in their buffers.
void TestSegmentsFit() {
  int num_low_latency = 0;
  for (int64_t ranks : {2, 6, 8, 32, 64}) {
    for (int64_t domain_size : {1, 2, 4, 8, 32}) {
      if (ranks % domain_size != 0 || ranks == domain_size) continue;
      for (int64_t tokens : {1, 7, 64, 128}) {
        for (int64_t top_k : {1, 8, 32}) {
          for (int64_t vectors : {1, 63, 64, 65, 256, 896, 1024}) {
            for (int64_t scales : {0, 8, 64, 512}) {
              const RowSegments segments =
                  Segments(ranks, domain_size, tokens, top_k, vectors, scales);
              if (segments.count() == 0) continue;
              ++num_low_latency;
              const int last = segments.count() - 1;
              CHECK(segments.First(last) < vectors && segments.End(last, vectors) == vectors);
              CHECK(segments.End(0, vectors) <= kMaxSegmentVectors);
              CHECK(segments.EndScaleWord(last, scales) == scales);
              CHECK(segments.EndScaleWord(0, scales) <= kMaxSegmentScaleWords);
              CHECK(tokens * segments.count() <= kMaxDomainEagerSegments);
              CHECK(tokens * (vectors + scales / 4) * 16 <= kDomainEagerRowBytes);
            }
          }
        }
      }
    }
  }
  CHECK(num_low_latency > 1000);
}

void TestDecodingOfPractice() {
  CHECK(Segments(64, 8, 128, 8, 896).count() == 7);
  CHECK(Segments(64, 8, 1, 8, 896).count() == 14);
  CHECK(Segments(2, 1, 128, 8, 896).count() == 14);
  CHECK(Segments(64, 8, 129, 8, 896).count() == 0);
  CHECK(Segments(72, 8, 128, 8, 896).count() == 0);
  CHECK(DomainEagerBytes(64) <= int64_t{300} << 20 && DomainEagerBytes(72) == 0);
}

void TestRoutesArePacked() {
  for (int32_t expert : {-1, 0, 1, kMaxExperts - 1}) {
    for (int32_t position : {0, 1, static_cast<int32_t>(kMaxDomainEagerAssignments) - 1}) {
      const uint32_t packed = PackRoute(expert, position);
      CHECK(PositionOf(packed) == position);
      CHECK(expert < 0 ? ExpertOf(packed) >= kMaxExperts : ExpertOf(packed) == expert);
    }
  }
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::TestDomains();
  jax_ep::TestRailSlots();
  jax_ep::TestChunkNumbersRise();
  jax_ep::TestASizeOfPractice();
  jax_ep::TestBoundsOfTests();
  jax_ep::TestNoTokens();
  jax_ep::TestWhatDoesNotFit();
  jax_ep::TestEverywhere();
  jax_ep::TestSegmentsFit();
  jax_ep::TestDecodingOfPractice();
  jax_ep::TestRoutesArePacked();
  return jax_ep::testing::Finish();
}
