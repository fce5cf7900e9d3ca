// Tests what calls over several NVLink domains are compared with, by an example computed by hand.
#include "tests/cpp/gpu/transfer/contract.h"

#include <tuple>
#include <vector>

#include "tests/cpp/unit/check.h"

namespace harness {
namespace {

// Four ranks in two domains of two, an expert and two tokens per rank. Rank 0's first token goes to
// all experts, its second one to expert 3. Rank 1's first token goes to experts 2 and 1, and its
// second one twice to expert 2, which has no room for it.
Routing Example(int domain_size) {
  return {.tokens = 2,
          .top_k = 4,
          .experts = 4,
          .ranks = 4,
          .rows = 3,
          .align = 1,
          .domain_size = domain_size,
          .ids = {{3, 0, 2, 1, -1, 3, -1, -1},
                  {2, 1, -1, -1, 2, 2, -1, -1},
                  {-1, -1, -1, -1, -1, -1, -1, -1},
                  {-1, -1, -1, -1, -1, -1, -1, -1}}};
}

void TestForwarding() {
  Routing routing = Example(2);
  routing.rows = 2;
  const std::vector<HostPlan> plans = MakePlans(routing);
  CHECK(plans[2].num_dropped == 2);  // rank 1's: sources have equal quotas
  using Indices = std::vector<int32_t>;
  CHECK((plans[0].partial_sum_index == Indices{0, -1}));
  CHECK((plans[1].partial_sum_index == Indices{1, 0}));
  CHECK((plans[2].partial_sum_index == Indices{2, 1}));
  CHECK((plans[3].partial_sum_index == Indices{3, 0}));
  CHECK((plans[0].domain_partial_sum_index == Indices{0, -1}));
  CHECK((plans[1].domain_partial_sum_index == Indices{1, 0}));
  CHECK((plans[2].domain_partial_sum_index == Indices{0, 0}));
  CHECK((plans[3].domain_partial_sum_index == Indices{1, 0}));
  // [domain, token], a bit for each of the two ranks here.
  using Masks = std::vector<uint32_t>;
  CHECK((plans[0].token_ranks == Masks{3, 0, 0, 0}));
  CHECK((plans[1].token_ranks == Masks{2, 0, 0, 0}));
  CHECK((plans[2].token_ranks == Masks{3, 2, 0, 0}));
  CHECK((plans[3].token_ranks == Masks{1, 0, 0, 0}));
  CHECK(MakePlans(Example(0))[2].token_ranks.empty());
  CHECK(MakePlans(Example(0))[2].domain_partial_sum_index.empty());
}

// A domain of more ranks than a word has bits.
void TestWordsOfADomain() {
  Routing routing = {.tokens = 1,
                     .top_k = 2,
                     .experts = 80,
                     .ranks = 80,
                     .rows = 2,
                     .align = 1,
                     .domain_size = 40,
                     .ids = std::vector<std::vector<int32_t>>(80, {-1, -1})};
  routing.ids[1] = {79, 41};
  const HostPlan plan = MakePlans(routing)[41];
  CHECK((plan.token_ranks == std::vector<uint32_t>{2, 1 << 7, 0, 0}));
}

// Bfloat16 has eight bits: 257 is rounded to 256, and 259 to 260.
void TestDomainSumsAreRounded() {
  for (const auto& [domain_size, first, second] :
       {std::tuple{0, 260.0f, 1.0f}, {2, 258.0f, 1.0f}, {1, 260.0f, 1.0f}}) {
    Routing routing = Example(domain_size);
    const std::vector<HostPlan> plans = MakePlans(routing);
    std::vector<Bytes> y(4, Bytes(3 * 2)), out;
    for (int r = 0; r < 4; ++r) {
      for (int row = 0; row < 3; ++row) {
        WriteElement(y[r], row, jax_ep::kBF16, r == 0 && row == 0 ? 256.0f : 1.0f);
      }
    }
    std::vector<std::vector<float>> scalars;
    CombineRows(routing, plans, 1, jax_ep::kBF16, y, {}, {}, &out, &scalars);
    CHECK(ReadElement(out[0], 0, jax_ep::kBF16) == first);
    CHECK(ReadElement(out[0], 1, jax_ep::kBF16) == second);
    CHECK(ReadElement(out[1], 0, jax_ep::kBF16) == 2);
    CHECK(ReadElement(out[2], 0, jax_ep::kBF16) == 0);
  }
}

}  // namespace
}  // namespace harness

int main() {
  harness::TestForwarding();
  harness::TestWordsOfADomain();
  harness::TestDomainSumsAreRounded();
  return jax_ep::testing::Finish();
}
