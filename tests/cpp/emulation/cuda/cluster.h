// The fibers of a cluster of blocks: the inside of emulator.h.
#ifndef JAX_EP_TESTS_CPP_EMULATION_CUDA_CLUSTER_H_
#define JAX_EP_TESTS_CPP_EMULATION_CUDA_CLUSTER_H_

#include <setjmp.h>
#include <ucontext.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "tests/cpp/emulation/cuda/emulator.h"

namespace emulation {

inline constexpr unsigned kWarp = 32;

struct Barrier {
  uint64_t generation = 0;
  unsigned arrived = 0;
};

struct Warp {
  Barrier barrier;
  uint64_t values[2][kWarp];
};

struct Fiber {
  ucontext_t context;  // to begin
  jmp_buf jump;        // to go on
  bool has_begun = false;
  std::unique_ptr<char[]> stack;
  Place place;
  bool has_ended = false;
  const uint64_t* awaited = nullptr;
  uint64_t value = 0;
  uint64_t clock = uint64_t{1} << 60;
  int clock_reads = 0;
  uint64_t turn_of_clock = 0;       // when it last read its clock
  uint64_t cluster_generation = 0;  // at its arrival at the cluster's barrier
};

// Shared by the threads of a block.
struct Block {
  explicit Block(size_t shared_bytes, unsigned threads, std::mt19937_64& random)
      : threads_left(threads),
        warps((threads + kWarp - 1) / kWarp),
        shared(shared_bytes / 8 + 1024 / 8) {
    // Not zeros: shared memory is uninitialized.
    for (uint64_t& word : shared) word = random();
    const auto begin = reinterpret_cast<uintptr_t>(shared.data());
    shared_begin = reinterpret_cast<uint8_t*>((begin + 1023) / 1024 * 1024);
  }

  unsigned threads_left;    // without those that have ended
  uint64_t first_turn = 0;  // in which its threads begin
  std::vector<Warp> warps;
  Barrier barrier;
  Barrier named[16];
  bool any[2] = {};  // the values' disjunction, indexed by the barrier's generation
  std::vector<uint64_t> shared;
  uint8_t* shared_begin;  // aligned
};

// The blocks of a cluster, mostly one.
class Cluster {
 public:
  Cluster(const Grid& grid, unsigned index, uint64_t seed);
  void Run();
  // Jumps, and not swapcontext, which makes a system call.
  void SwitchToScheduler() {
    if (_setjmp(current_->jump) == 0) _longjmp(scheduler_, 1);
  }

  Fiber& current() { return *current_; }
  Block& block() { return blocks[current_->place.rank]; }
  Warp& warp() { return block().warps[current_->place.thread.x / kWarp]; }

  const std::function<void()>& kernel;
  std::deque<Block> blocks;  // indexed by rank
  Barrier barrier;
  std::vector<std::function<void()>> copies;
  std::mt19937_64 random;
  // How often all fibers have had a turn; the largest number at the end.
  const std::shared_ptr<std::atomic<uint64_t>> turns = std::make_shared<std::atomic<uint64_t>>(0);

 private:
  void SwitchTo(Fiber& fiber) {
    if (_setjmp(scheduler_) != 0) return;
    threadIdx = fiber.place.thread;
    blockIdx = fiber.place.block;
    blockDim = fiber.place.block_size;
    gridDim = fiber.place.grid;
    if (std::exchange(fiber.has_begun, true)) _longjmp(fiber.jump, 1);
    setcontext(&fiber.context);
  }
  void RunSomeCopies();
  void LetOthersRun(bool works, bool went_on);
  void FailDeadlock() const;

  std::vector<std::unique_ptr<Fiber>> fibers_;
  jmp_buf scheduler_;
  Fiber* current_ = nullptr;
  unsigned waiting_turns_ = 0;  // the latest ones, in which nothing but waits went on
};

extern thread_local Cluster* cluster;  // the running one
extern std::atomic<unsigned> running_clusters;

}  // namespace emulation

#endif  // JAX_EP_TESTS_CPP_EMULATION_CUDA_CLUSTER_H_
