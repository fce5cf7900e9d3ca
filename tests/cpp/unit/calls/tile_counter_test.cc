#include "ffi/runtime/calls/tile_counter.h"

#include <memory>
#include <set>
#include <vector>

#include "tests/cpp/unit/check.h"

namespace jax_ep {
namespace {

void TestNumbersComeBack() {
  std::vector<std::unique_ptr<TileCounter>> held;
  std::set<int32_t> numbers;
  for (int i = 0; i < kNumTileCounters; ++i) {
    held.push_back(std::make_unique<TileCounter>());
    numbers.insert(held.back()->number());
  }
  CHECK(numbers.size() == kNumTileCounters);
  CHECK(*numbers.begin() == 0 && *numbers.rbegin() == kNumTileCounters - 1);
  CHECK(TileCounter().number() == -1);
  const int32_t first = held[7]->number();
  const int32_t second = held[3]->number();
  held[7] = nullptr;
  held[3] = nullptr;
  // The one that was returned first.
  const TileCounter again;
  CHECK(again.number() == first);
  CHECK(TileCounter().number() == second);
}

void TestManyProgramsOneAfterAnother() {
  for (int i = 0; i < 3 * kNumTileCounters; ++i) CHECK(TileCounter().number() >= 0);
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::TestNumbersComeBack();
  jax_ep::TestManyProgramsOneAfterAnother();
  return jax_ep::testing::Finish();
}
