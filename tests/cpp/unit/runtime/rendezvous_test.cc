#include "ffi/runtime/groups/rendezvous.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpp/unit/check.h"

namespace jax_ep {
namespace {

using std::chrono::milliseconds;
using Place = Rendezvous<int>;

// Joins `count` threads to a rendezvous of `expected`, and returns each one's status.
std::vector<Status> Meet(Place& place, int64_t key, int count, int expected,
                         const Place::Work& work, milliseconds timeout) {
  std::vector<Status> statuses(count);
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) {
    threads.emplace_back(
        [&, i] { statuses[i] = place.Join(key, expected, 10 + i, work, timeout); });
  }
  for (std::thread& thread : threads) thread.join();
  return statuses;
}

void TestOneWorksForAll() {
  Place place;
  for (int64_t run = 0; run < 200; ++run) {
    std::atomic<int> calls = 0;
    std::vector<int> came;
    const auto work = [&](const std::vector<int>& contributions) {
      ++calls;
      came = contributions;
      return InvalidArgument("run ", run % 2);
    };
    // The same key serves one run after another.
    for (const Status& status : Meet(place, run % 3, 4, 4, work, milliseconds(20'000))) {
      CHECK_FAILS(status, "run " + std::to_string(run % 2));
    }
    CHECK(calls == 1);
    std::sort(came.begin(), came.end());
    CHECK((came == std::vector<int>{10, 11, 12, 13}));
  }
}

void TestWhoCameInTimeWaitsForTheWork() {
  Place place;
  const auto work = [](const std::vector<int>&) {
    std::this_thread::sleep_for(milliseconds(200));
    return Status{};
  };
  for (const Status& status : Meet(place, 1, 3, 3, work, milliseconds(50))) CHECK_OK(status);
}

void TestSomebodyDoesNotCome() {
  Place place;
  const auto work = [](const std::vector<int>&) { return Status{}; };
  for (const Status& status : Meet(place, 7, 2, 3, work, milliseconds(50))) {
    CHECK_FAILS(status, "only 2 of the 3 devices of the mesh in this process");
  }
  // A later participant is not counted with them.
  for (const Status& status : Meet(place, 7, 3, 3, work, milliseconds(20'000))) CHECK_OK(status);
}

void TestAnExceptionIsEveryonesStatus() {
  Place place;
  const auto throws = [](const std::vector<int>&) -> Status {
    throw std::runtime_error("no luck");
  };
  for (const Status& status : Meet(place, 1, 3, 3, throws, milliseconds(20'000))) {
    CHECK_FAILS(status, "no luck");
  }
  const auto throws_a_number = [](const std::vector<int>&) -> Status { throw 3; };
  for (const Status& status : Meet(place, 1, 3, 3, throws_a_number, milliseconds(20'000))) {
    CHECK_FAILS(status, "unknown exception");
  }
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::TestOneWorksForAll();
  jax_ep::TestWhoCameInTimeWaitsForTheWork();
  jax_ep::TestSomebodyDoesNotCome();
  jax_ep::TestAnExceptionIsEveryonesStatus();
  return jax_ep::testing::Finish();
}
