#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "tests/cpp/emulation/cuda/cluster.h"

namespace emulation {

Settings settings;
Hooks hooks;

namespace {

// Indexed by device: the SMs that blocks have.
std::atomic<unsigned> taken_sms[256];

// All at once: two clusters that each had one SM would wait for each other.
void TakeSms(int device, unsigned count) {
  std::atomic<unsigned>& taken = taken_sms[device];
  for (unsigned now = taken;;) {
    if (now + count > settings.num_sms) {
      taken.wait(now);
      now = taken;
    } else if (taken.compare_exchange_weak(now, now + count)) {
      return;
    }
  }
}

void ReturnSms(int device, unsigned count) {
  taken_sms[device] -= count;
  taken_sms[device].notify_all();
}

// Returns the generation that is awaited, which has ended if this is the last thread to arrive.
uint64_t Arrive(Barrier& barrier, size_t count) {
  const uint64_t generation = barrier.generation;
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
  return generation;
}

void Await(const Barrier& barrier, uint64_t generation) {
  if (barrier.generation == generation) AwaitChange(&barrier.generation, generation);
}

void Pass(Barrier& barrier, size_t count) { Await(barrier, Arrive(barrier, count)); }

}  // namespace

void Fail(const std::string& what) {
  std::printf("FAIL %s\n", what.c_str());
  std::fflush(stdout);
  std::_Exit(1);
}

const Place& Here() { return cluster->current().place; }

void Yield() { cluster->SwitchToScheduler(); }

uint64_t Clock() {
  constexpr uint64_t kStep = 500'000;
  constexpr uint64_t kStepBack = 2 * kStep;
  constexpr unsigned kFewBlocks = 16;
  Fiber& fiber = cluster->current();
  fiber.turn_of_clock = *cluster->turns;
  // The more blocks share the CPUs, the longer each of them has to wait for its turn.
  fiber.clock += kStep * kFewBlocks / std::max<unsigned>(kFewBlocks, running_clusters);
  if (++fiber.clock_reads == 2) fiber.clock -= kStepBack;
  return fiber.clock;
}

void AwaitChange(const uint64_t* word, uint64_t value) {
  cluster->current().awaited = word;
  cluster->current().value = value;
  cluster->SwitchToScheduler();
}

bool BarrierOfBlock(bool value) {
  Block* const block = &cluster->block();
  const uint64_t generation = block->barrier.generation;
  block->any[generation % 2] |= value;
  const unsigned count = Here().block_size.x;
  // The last thread resets it: all have read the values of the barrier before.
  if (block->barrier.arrived + 1 == count) block->any[(generation + 1) % 2] = false;
  Pass(block->barrier, count);
  return block->any[generation % 2];
}

void BarrierOfSome(int number, unsigned threads) { Pass(cluster->block().named[number], threads); }

const uint64_t* Exchange(uint64_t value) {
  Warp& warp = cluster->warp();
  uint64_t* const values = warp.values[warp.barrier.generation % 2];
  values[Here().thread.x % kWarp] = value;
  Pass(warp.barrier, kWarp);
  return values;
}

void ArriveAtCluster() {
  cluster->current().cluster_generation =
      Arrive(cluster->barrier, cluster->blocks.size() * Here().block_size.x);
}
void WaitForCluster() { Await(cluster->barrier, cluster->current().cluster_generation); }

uint8_t* SharedMemory() { return cluster->block().shared_begin; }
uint8_t* SharedMemory(unsigned rank) {
  const Block& block = cluster->blocks[rank];
  if (block.threads_left == 0) Fail("a block accesses shared memory of a block that has ended");
  return block.shared_begin;
}

uint64_t Random() { return cluster->random(); }

void RunLater(std::function<void()> copy) { cluster->copies.push_back(std::move(copy)); }

unsigned ResidentBlocks(int device) { return taken_sms[device]; }

void RunGrid(int device, const Grid& grid) {
  static std::atomic<uint64_t> launches = 0;
  const uint64_t seed = settings.seed * 1'000'003 + launches++;
  std::mt19937_64 random(seed);
  std::vector<unsigned> order(grid.blocks / grid.cluster_blocks);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), random);
  std::atomic<unsigned> next = 0;
  const auto work = [&] {
    for (unsigned i; (i = next++) < order.size();) {
      TakeSms(device, grid.cluster_blocks);
      Cluster(grid, order[i], seed * 977 + order[i]).Run();
      ReturnSms(device, grid.cluster_blocks);
    }
  };
  std::vector<std::jthread> workers;
  const size_t resident = std::max(settings.resident_blocks / grid.cluster_blocks, 1u);
  for (size_t i = 0; i < std::min(order.size(), resident); ++i) workers.emplace_back(work);
}

}  // namespace emulation
