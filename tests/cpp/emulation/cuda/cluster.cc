#include "tests/cpp/emulation/cuda/cluster.h"

#include <cstdio>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>

namespace emulation {

thread_local Cluster* cluster = nullptr;
std::atomic<unsigned> running_clusters = 0;

namespace {

constexpr size_t kStackBytes = 96 * 1024;

std::mutex turns_mutex;
std::set<std::shared_ptr<std::atomic<uint64_t>>> turns_of_clusters;  // holds the running ones

// Keeps stacks for the next blocks.
std::mutex stacks_mutex;
std::vector<std::unique_ptr<char[]>> stacks;

std::unique_ptr<char[]> TakeStack() {
  const std::lock_guard lock(stacks_mutex);
  if (stacks.empty()) return std::unique_ptr<char[]>(new char[kStackBytes]);
  std::unique_ptr<char[]> stack = std::move(stacks.back());
  stacks.pop_back();
  return stack;
}

void RunFiber() {
  cluster->kernel();
  cluster->current().has_ended = true;
  --cluster->block().threads_left;
  cluster->SwitchToScheduler();
}

}  // namespace

Cluster::Cluster(const Grid& grid, unsigned index, uint64_t seed)
    : kernel(grid.kernel), random(seed) {
  for (unsigned rank = 0; rank < grid.cluster_blocks; ++rank) {
    blocks.emplace_back(grid.shared_bytes, grid.threads, random);
    // Blocks of a cluster do not begin together.
    if (grid.cluster_blocks > 1) blocks.back().first_turn = random() % 64;
    for (unsigned thread = 0; thread < grid.threads; ++thread) {
      auto fiber = std::make_unique<Fiber>();
      fiber->stack = TakeStack();
      fiber->place = {dim3(thread),
                      dim3(index * grid.cluster_blocks + rank),
                      dim3(grid.threads),
                      dim3(grid.blocks),
                      rank,
                      rank * grid.threads + thread};
      getcontext(&fiber->context);
      fiber->context.uc_stack.ss_sp = fiber->stack.get();
      fiber->context.uc_stack.ss_size = kStackBytes;
      fiber->context.uc_link = nullptr;
      makecontext(&fiber->context, &RunFiber, 0);
      fibers_.push_back(std::move(fiber));
    }
  }
}

void Cluster::RunSomeCopies() {
  if (copies.empty() || random() % 3 == 0) return;
  // Any order is legal: only mbarriers and bulk groups tell that copies have run.
  const size_t chosen = random() % copies.size();
  const std::function<void()> copy = std::move(copies[chosen]);
  copies.erase(copies.begin() + static_cast<ptrdiff_t>(chosen));
  copy();
}

// No fiber can go on, and no copy is left. Says what the first thread of each warp waits for.
void Cluster::FailDeadlock() const {
  for (const auto& fiber : fibers_) {
    const Place& place = fiber->place;
    if (fiber->has_ended || place.thread.x % kWarp != 0) continue;
    const auto* const awaited = reinterpret_cast<const uint8_t*>(fiber->awaited);
    const ptrdiff_t offset = awaited - blocks[place.rank].shared_begin;
    const auto bytes = static_cast<ptrdiff_t>(blocks[place.rank].shared.size() * 8);
    std::printf("  block %u warp %u: ", place.block.x, place.thread.x / kWarp);
    if (offset >= 0 && offset < bytes) {
      std::printf("the mbarrier at byte %td of shared memory\n", offset);
    } else {
      std::printf("other threads, or a copy\n");
    }
  }
  Fail("a deadlock: all threads of a cluster wait");
}

// Waits for other blocks take turns, too. A fiber that waits reads its clock every few turns.
constexpr uint64_t kTurnsOfWait = 64;

// A block that only waits sleeps, and longer as it waits longer: the CPUs are for those that work.
// Not so by yield(): Linux lets a thread that yields wait for all that do not.
void Cluster::LetOthersRun(bool works, bool went_on) {
  constexpr unsigned kTurnsBetweenSleeps = 16;
  constexpr unsigned kMicrosecondsPerBlock = 20;
  waiting_turns_ = works || !copies.empty() ? 0 : waiting_turns_ + 1;
  if (waiting_turns_ % kTurnsBetweenSleeps == kTurnsBetweenSleeps - 1) {
    std::this_thread::sleep_for(std::chrono::microseconds(
        std::min(5 * waiting_turns_, kMicrosecondsPerBlock * running_clusters)));
  } else if (!went_on && copies.empty()) {
    std::this_thread::yield();
  }
}

void Cluster::Run() {
  cluster = this;
  ++running_clusters;
  {
    const std::lock_guard lock(turns_mutex);
    turns_of_clusters.insert(turns);
  }
  size_t left = fibers_.size();
  while (left > 0) {
    bool runs = false, works = false, went_on = false;
    // Each turn has another order, in which the lanes of a warp do not follow each other.
    const size_t count = fibers_.size();
    size_t next = random() % count;
    size_t step = 1 + random() % count;
    while (std::gcd(step, count) != 1) ++step;
    for (size_t i = 0; i < count; ++i, next = (next + step) % count) {
      Fiber& fiber = *fibers_[next];
      if (fiber.has_ended) continue;
      if (*turns < blocks[fiber.place.rank].first_turn) {
        runs = true;
        continue;
      }
      if (fiber.awaited != nullptr && *fiber.awaited == fiber.value) continue;
      works |= *turns > fiber.turn_of_clock + kTurnsOfWait;
      went_on |= fiber.awaited != nullptr;
      fiber.awaited = nullptr;
      runs = true;
      current_ = &fiber;
      SwitchTo(fiber);
      if (fiber.has_ended) --left, went_on = true;
    }
    if (!runs && copies.empty()) FailDeadlock();
    ++*turns;
    LetOthersRun(works, went_on);
    RunSomeCopies();
  }
  {
    const std::lock_guard lock(turns_mutex);
    turns_of_clusters.erase(turns);
  }
  *turns = UINT64_MAX;
  if (!copies.empty()) Fail("a block has ended before its asynchronous copies");
  --running_clusters;
  cluster = nullptr;
  const std::lock_guard lock(stacks_mutex);
  for (auto& fiber : fibers_) stacks.push_back(std::move(fiber->stack));
}

void AwaitTurns() {
  std::vector<std::pair<std::shared_ptr<std::atomic<uint64_t>>, uint64_t>> awaited;
  {
    const std::lock_guard lock(turns_mutex);
    for (const auto& turns : turns_of_clusters) awaited.push_back({turns, *turns + 2});
  }
  for (const auto& [turns, least] : awaited) {
    while (*turns < least) Yield();
  }
}

}  // namespace emulation
