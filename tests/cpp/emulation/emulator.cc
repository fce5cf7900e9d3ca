#include <setjmp.h>
#include <ucontext.h>

#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

namespace emulation {

Settings settings;

namespace {

constexpr size_t kStackBytes = 96 * 1024;
constexpr unsigned kWarp = 32;

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
};

class Block {
 public:
  Block(unsigned index, unsigned blocks, unsigned threads, size_t shared_bytes,
        const std::function<void()>& kernel, uint64_t seed);
  void Run();
  // Jumps, and not swapcontext, which makes a system call.
  void SwitchToScheduler() {
    if (_setjmp(current_->jump) == 0) _longjmp(scheduler_, 1);
  }

  Fiber& current() { return *current_; }
  Warp& warp() { return warps_[current_->place.thread.x / kWarp]; }

  const std::function<void()>& kernel;
  Barrier barrier;
  Barrier named[16];
  bool any[2] = {};  // the values' disjunction, indexed by the barrier's generation
  std::vector<uint8_t> shared;
  uint8_t* shared_begin;  // aligned
  std::vector<std::function<void()>> copies;
  // How often all fibers have had a turn; the largest number at the end.
  const std::shared_ptr<std::atomic<uint64_t>> turns = std::make_shared<std::atomic<uint64_t>>(0);

 private:
  void SwitchTo(Fiber& fiber) {
    if (_setjmp(scheduler_) != 0) return;
    if (std::exchange(fiber.has_begun, true)) _longjmp(fiber.jump, 1);
    setcontext(&fiber.context);
  }
  void RunSomeCopies();

  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Warp> warps_;
  jmp_buf scheduler_;
  Fiber* current_ = nullptr;
  std::mt19937_64 random_;
};

thread_local Block* block = nullptr;
std::mutex turns_mutex;
std::set<std::shared_ptr<std::atomic<uint64_t>>> turns_of_blocks;  // holds the running ones
std::atomic<unsigned> running_blocks = 0;

// Indexed by device: the SMs that blocks have.
std::atomic<unsigned> taken_sms[256];

void TakeSm(int device) {
  std::atomic<unsigned>& taken = taken_sms[device];
  for (unsigned now = taken;;) {
    if (now >= settings.num_sms) {
      taken.wait(now);
      now = taken;
    } else if (taken.compare_exchange_weak(now, now + 1)) {
      return;
    }
  }
}

void ReturnSm(int device) {
  --taken_sms[device];
  taken_sms[device].notify_one();
}

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
  block->kernel();
  block->current().has_ended = true;
  block->SwitchToScheduler();
}

Block::Block(unsigned index, unsigned blocks, unsigned threads, size_t shared_bytes,
             const std::function<void()>& kernel, uint64_t seed)
    : kernel(kernel),
      shared(shared_bytes + 1024),
      warps_((threads + kWarp - 1) / kWarp),
      random_(seed) {
  // Not zeros: shared memory is uninitialized.
  for (uint8_t& byte : shared) byte = static_cast<uint8_t>(random_());
  shared_begin = shared.data() + (1024 - reinterpret_cast<uintptr_t>(shared.data()) % 1024) % 1024;
  for (unsigned thread = 0; thread < threads; ++thread) {
    auto fiber = std::make_unique<Fiber>();
    fiber->stack = TakeStack();
    fiber->place = {dim3(thread), dim3(index), dim3(threads), dim3(blocks)};
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack.get();
    fiber->context.uc_stack.ss_size = kStackBytes;
    fiber->context.uc_link = nullptr;
    makecontext(&fiber->context, &RunFiber, 0);
    fibers_.push_back(std::move(fiber));
  }
}

void Block::RunSomeCopies() {
  if (copies.empty() || random_() % 3 == 0) return;
  // Any order is legal: only mbarriers and bulk groups tell that copies have run.
  const size_t chosen = random_() % copies.size();
  const std::function<void()> copy = std::move(copies[chosen]);
  copies.erase(copies.begin() + static_cast<ptrdiff_t>(chosen));
  copy();
}

void Block::Run() {
  block = this;
  ++running_blocks;
  {
    const std::lock_guard lock(turns_mutex);
    turns_of_blocks.insert(turns);
  }
  size_t left = fibers_.size();
  while (left > 0) {
    bool went_on = false;
    const size_t first = random_() % fibers_.size();
    for (size_t i = 0; i < fibers_.size(); ++i) {
      Fiber& fiber = *fibers_[(first + i) % fibers_.size()];
      if (fiber.has_ended) continue;
      if (fiber.awaited != nullptr && *fiber.awaited == fiber.value) continue;
      went_on = went_on || fiber.awaited != nullptr;
      fiber.awaited = nullptr;
      current_ = &fiber;
      SwitchTo(fiber);
      if (fiber.has_ended) --left, went_on = true;
    }
    ++*turns;
    RunSomeCopies();
    if (!went_on) std::this_thread::yield();
  }
  {
    const std::lock_guard lock(turns_mutex);
    turns_of_blocks.erase(turns);
  }
  *turns = UINT64_MAX;
  while (!copies.empty()) RunSomeCopies();
  --running_blocks;
  block = nullptr;
  const std::lock_guard lock(stacks_mutex);
  for (auto& fiber : fibers_) stacks.push_back(std::move(fiber->stack));
}

void Pass(Barrier& barrier, unsigned count) {
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    ++barrier.generation;
  } else {
    AwaitChange(&barrier.generation, barrier.generation);
  }
}

}  // namespace

const Place& Here() { return block->current().place; }

void Yield() { block->SwitchToScheduler(); }

void AwaitTurns() {
  std::vector<std::pair<std::shared_ptr<std::atomic<uint64_t>>, uint64_t>> awaited;
  {
    const std::lock_guard lock(turns_mutex);
    for (const auto& turns : turns_of_blocks) awaited.push_back({turns, *turns + 2});
  }
  for (const auto& [turns, least] : awaited) {
    while (*turns < least) Yield();
  }
}

uint64_t Clock() {
  constexpr uint64_t kStep = 500'000;
  constexpr uint64_t kStepBack = 2 * kStep;
  constexpr unsigned kFewBlocks = 16;
  constexpr int kReadsBetweenSleeps = 64;
  Fiber& fiber = block->current();
  // The more blocks share the CPUs, the longer each of them has to wait for its turn.
  fiber.clock += kStep * kFewBlocks / std::max<unsigned>(kFewBlocks, running_blocks);
  if (++fiber.clock_reads == 2) fiber.clock -= kStepBack;
  // A fiber that reads the clock waits: other blocks get the CPU.
  if (fiber.clock_reads % kReadsBetweenSleeps == 0)
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  return fiber.clock;
}

void AwaitChange(const uint64_t* word, uint64_t value) {
  block->current().awaited = word;
  block->current().value = value;
  block->SwitchToScheduler();
}

bool BarrierOfBlock(bool value) {
  const uint64_t generation = block->barrier.generation;
  block->any[generation % 2] |= value;
  const unsigned count = Here().block_size.x;
  // The last thread resets it: all have read the values of the barrier before.
  if (block->barrier.arrived + 1 == count) block->any[(generation + 1) % 2] = false;
  Pass(block->barrier, count);
  return block->any[generation % 2];
}

void BarrierOfSome(int number, unsigned threads) { Pass(block->named[number], threads); }

const uint64_t* Exchange(uint64_t value) {
  Warp& warp = block->warp();
  uint64_t* const values = warp.values[warp.barrier.generation % 2];
  values[Here().thread.x % kWarp] = value;
  Pass(warp.barrier, kWarp);
  return values;
}

uint8_t* SharedMemory() { return block->shared_begin; }

void RunLater(std::function<void()> copy) { block->copies.push_back(std::move(copy)); }

unsigned ResidentBlocks(int device) { return taken_sms[device]; }

void RunGrid(int device, unsigned blocks, unsigned threads, size_t shared_bytes,
             const std::function<void()>& kernel) {
  static std::atomic<uint64_t> launches = 0;
  const uint64_t seed = settings.seed * 1'000'003 + launches++;
  std::mt19937_64 random(seed);
  std::vector<unsigned> order(blocks);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), random);
  std::atomic<unsigned> next = 0;
  const auto work = [&] {
    for (unsigned i; (i = next++) < blocks;) {
      TakeSm(device);
      Block(order[i], blocks, threads, shared_bytes, kernel, seed * 977 + order[i]).Run();
      ReturnSm(device);
    }
  };
  std::vector<std::jthread> workers;
  for (unsigned i = 0; i < std::min(blocks, settings.resident_blocks); ++i)
    workers.emplace_back(work);
}

}  // namespace emulation
