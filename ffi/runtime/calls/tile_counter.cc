#include "ffi/runtime/calls/tile_counter.h"

#include <deque>
#include <mutex>

namespace jax_ep {
namespace {

struct Pool {
  std::mutex mutex;
  int32_t num_used = 0;
  // The oldest is used first: a kernel of a destroyed program may still run.
  std::deque<int32_t> returned;
};

Pool& ThePool() {
  static auto& pool = *new Pool;  // never destroyed: programs may outlive main
  return pool;
}

int32_t Take() {
  Pool& pool = ThePool();
  const std::lock_guard lock(pool.mutex);
  if (pool.num_used < kNumTileCounters) return pool.num_used++;
  if (pool.returned.empty()) return -1;
  const int32_t number = pool.returned.front();
  pool.returned.pop_front();
  return number;
}

}  // namespace

TileCounter::TileCounter() : number_(Take()) {}

TileCounter::~TileCounter() {
  if (number_ < 0) return;
  Pool& pool = ThePool();
  const std::lock_guard lock(pool.mutex);
  pool.returned.push_back(number_);
}

}  // namespace jax_ep
