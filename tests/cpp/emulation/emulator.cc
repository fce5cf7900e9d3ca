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
Hooks hooks;

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
  uint64_t turn_of_clock = 0;  // when it last read its clock
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
  void LetOthersRun(bool works, bool went_on);

  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Warp> warps_;
  jmp_buf scheduler_;
  Fiber* current_ = nullptr;
  unsigned waiting_turns_ = 0;  // the latest ones, in which nothing but waits went on
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

// Waits for other blocks take turns, too. A fiber that waits reads its clock every few turns.
constexpr uint64_t kTurnsOfWait = 64;

// A block that only waits sleeps, and longer as it waits longer: the CPUs are for those that work.
// Not so by yield(): Linux lets a thread that yields wait for all that do not.
void Block::LetOthersRun(bool works, bool went_on) {
  constexpr unsigned kTurnsBetweenSleeps = 16;
  constexpr unsigned kMicrosecondsPerBlock = 20;
  waiting_turns_ = works || !copies.empty() ? 0 : waiting_turns_ + 1;
  if (waiting_turns_ % kTurnsBetweenSleeps == kTurnsBetweenSleeps - 1) {
    std::this_thread::sleep_for(std::chrono::microseconds(
        std::min(5 * waiting_turns_, kMicrosecondsPerBlock * running_blocks)));
  } else if (!went_on && copies.empty()) {
    std::this_thread::yield();
  }
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
    bool works = false, went_on = false;
    const size_t first = random_() % fibers_.size();
    for (size_t i = 0; i < fibers_.size(); ++i) {
      Fiber& fiber = *fibers_[(first + i) % fibers_.size()];
      if (fiber.has_ended) continue;
      if (fiber.awaited != nullptr && *fiber.awaited == fiber.value) continue;
      works |= *turns > fiber.turn_of_clock + kTurnsOfWait;
      went_on |= fiber.awaited != nullptr;
      fiber.awaited = nullptr;
      current_ = &fiber;
      SwitchTo(fiber);
      if (fiber.has_ended) --left, went_on = true;
    }
    ++*turns;
    LetOthersRun(works, went_on);
    RunSomeCopies();
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
  Fiber& fiber = block->current();
  fiber.turn_of_clock = *block->turns;
  // The more blocks share the CPUs, the longer each of them has to wait for its turn.
  fiber.clock += kStep * kFewBlocks / std::max<unsigned>(kFewBlocks, running_blocks);
  if (++fiber.clock_reads == 2) fiber.clock -= kStepBack;
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
