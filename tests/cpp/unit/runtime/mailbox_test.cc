#include "ffi/runtime/groups/mailbox.h"

#include <atomic>
#include <thread>
#include <vector>

#include "tests/cpp/unit/check.h"

namespace jax_ep {
namespace {

void TestOrder() {
  Mailbox mailbox;
  CHECK(mailbox.Take().empty());
  const TimeoutReport first{0, 3, "dispatch.entry", 7}, second{1, 3, "combine.progress", 8};
  CHECK(mailbox.Post(first) && mailbox.Post(second));
  CHECK((mailbox.Take() == std::vector<TimeoutReport>{first, second}));
  CHECK(mailbox.Take().empty());
}

void TestFull() {
  Mailbox mailbox;
  for (size_t i = 0; i < Mailbox::kCapacity; ++i) CHECK(mailbox.Post({}));
  CHECK(!mailbox.Post({}));
  CHECK(mailbox.Take().size() == Mailbox::kCapacity);
  CHECK(mailbox.Post({}));
}

// No report is lost or doubled, and each thread's reports stay in order.
void TestThreads() {
  constexpr int kThreads = 4, kReports = 200;
  Mailbox mailbox;
  std::atomic<int> running = kThreads;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kThreads; ++rank) {
    threads.emplace_back([&, rank] {
      for (int sequence = 0; sequence < kReports; ++sequence)
        mailbox.Post({rank, 0, "entry", sequence});
      --running;
    });
  }
  std::vector<int64_t> next(kThreads, 0);
  const auto take = [&] {
    for (const TimeoutReport& report : mailbox.Take()) {
      CHECK(report.sequence == next[report.rank]);
      ++next[report.rank];
    }
  };
  while (running > 0) take();
  for (std::thread& thread : threads) thread.join();
  take();
  for (int64_t taken : next) CHECK(taken == kReports);
}

void TestProcessMailbox() {
  CHECK(&ProcessMailbox() == &ProcessMailbox());
  CHECK(ProcessMailbox().Post({2, 1, "entry", 5}));
  CHECK(ProcessMailbox().Take().size() == 1);
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::TestOrder();
  jax_ep::TestFull();
  jax_ep::TestThreads();
  jax_ep::TestProcessMailbox();
  return jax_ep::testing::Finish();
}
