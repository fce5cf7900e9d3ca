// Tests the exchange of identities by NCCL, with an NCCL whose all-gather goes through memory that
// processes share. The program exports its functions, as libnccl.so.2 does.
#include <unistd.h>

#include <cstdlib>
#include <vector>

#include "ffi/runtime/transport/local/cuda_transport.h"
#include "tests/cpp/emulation/cuda/cuda_runtime_api.h"
#include "tests/cpp/emulation/processes/forks.h"
#include "tests/cpp/emulation/processes/shared_transport.h"

namespace jax_ep {
namespace {

using testing::Forks;

constexpr size_t kRanks = 6;
constexpr int kRemoteError = 6;

// Memory that the ranks of a communicator share.
struct Ring {
  std::atomic<int> error = 0;
  std::atomic<size_t> arrived = 0;
  std::atomic<int> num_queries = 0;
  char sent[kRanks][sizeof(Identity)];
};

struct Communicator {
  Ring* ring;
  size_t rank;
  size_t num_ranks;
};

struct Gather {
  const Communicator* communicator;
  char* to;
  size_t bytes;
};

void GatherKernel(Gather gather) {
  const auto& [ring, rank, num_ranks] = *gather.communicator;
  while (ring->arrived < num_ranks) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  for (size_t from = 0; from < num_ranks; ++from) {
    std::memcpy(gather.to + from * gather.bytes, ring->sent[from], gather.bytes);
  }
}

// Gathers in a process that drives some ranks.
Status Exchange(Ring* ring, size_t num_ranks, size_t first, size_t count,
                std::vector<Identity>* identities) {
  emulation::Register(reinterpret_cast<const void*>(GatherKernel), GatherKernel);
  static std::vector<Communicator> communicators;
  std::vector<Exchange::Endpoint> local;
  for (size_t i = 0; i < count; ++i) communicators.push_back({ring, first + i, num_ranks});
  for (size_t i = 0; i < count; ++i) {
    local.push_back({static_cast<int>(i), static_cast<int64_t>(first + i), &communicators[i]});
  }
  return CudaExchange()->AllGather(local, ThisProcess(), num_ranks, identities);
}

void TestAllGather() {
  auto* const ring = testing::SharedBetweenForks<Ring>();
  Forks forks(3, [&](int index) {
    std::vector<Identity> all;
    CHECK_OK(Exchange(ring, kRanks, 2 * static_cast<size_t>(index), 2, &all));
    CHECK(all.size() == kRanks);
    for (size_t rank = 0; rank < all.size(); ++rank) {
      CHECK(all[rank].logical_id == static_cast<int64_t>(rank));
      CHECK(all[rank].device == static_cast<int64_t>(rank % 2));
      CHECK((all[rank].pid == getpid()) == (static_cast<int>(rank) / 2 == index));
      CHECK(all[rank].process == all[rank ^ 1].process);
    }
    CHECK_OK(CheckVersions(all));
  });
  forks.Await(30);
  CHECK(ring->num_queries > 1);  // the first says that it is in progress
}

// A process that has died before the exchange is noticed at the deadline.
void TestDeadline() {
  auto* const ring = testing::SharedBetweenForks<Ring>();
  const auto start = std::chrono::steady_clock::now();
  Forks forks(2, [&](int index) {
    if (index == 1) raise(SIGKILL);
    setenv("JAX_EP_ENTRY_TIMEOUT_S", "1", 1);
    setenv("JAX_EP_WARN_AFTER_S", "0.5", 1);
    std::vector<Identity> all;
    const Status status = Exchange(ring, 2, 0, 1, &all);
    CHECK_FAILS(status, "could not exchange identities by NCCL");
    CHECK_FAILS(status, "within the deadline (JAX_EP_ENTRY_TIMEOUT_S)");
  });
  forks.Await(10, 1);
  const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
  CHECK(waited.count() >= 1);
}

// NCCL tells of a network connection that has ended, also after the all-gather has begun.
void TestRemoteError() {
  auto* const ring = testing::SharedBetweenForks<Ring>();
  Forks forks(2, [&](int index) {
    if (index == 1) {
      while (ring->num_queries < 3) std::this_thread::yield();
      ring->error = kRemoteError;
      return;
    }
    std::vector<Identity> all;
    CHECK_FAILS(Exchange(ring, 2, 0, 1, &all), "NCCL error 6");
  });
  forks.Await(10);
}

}  // namespace
}  // namespace jax_ep

using jax_ep::Communicator;
using jax_ep::Gather;

#pragma GCC visibility push(default)
extern "C" {

int ncclGroupStart() { return 0; }
int ncclGroupEnd() { return 7; }  // in progress

int ncclAllGather(const void* send, void* receive, size_t count, int, void* communicator,
                  cudaStream_t stream) {
  const auto* const of = static_cast<const Communicator*>(communicator);
  std::memcpy(of->ring->sent[of->rank], send, count);
  ++of->ring->arrived;
  Gather gather = {of, static_cast<char*>(receive), count};
  void* arguments[] = {&gather};
  return cudaLaunchKernel(reinterpret_cast<const void*>(jax_ep::GatherKernel), 1, 32, arguments, 0,
                          stream);
}

int ncclCommGetAsyncError(void* communicator, int* error) {
  jax_ep::Ring& ring = *static_cast<const Communicator*>(communicator)->ring;
  *error = ring.num_queries++ == 0 ? 7 : ring.error.load();
  return 0;
}

const char* ncclGetErrorString(int) { return "NCCL error 6"; }
}
#pragma GCC visibility pop

int main() {
  jax_ep::TestAllGather();
  jax_ep::TestDeadline();
  jax_ep::TestRemoteError();
  return jax_ep::testing::Finish();
}
