// How long a message takes from a kernel's request to its flag on another GPU, by UCX and a thread
// of the host, between two processes with a GPU each:
//
//   network_latency FOLDER        has libucp.so.0; UCX_TLS chooses the transports
//
// Kernels of both GPUs send one message to and fro. A line tells half of a round trip's median and
// 99th percentile, for messages of several sizes.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ffi/device/protocol/control_block.h"
#include "ffi/device/ptx/memory.cuh"
#include "ffi/device/transfer/hierarchical/layout.h"
#include "ffi/runtime/network/networks.h"
#include "ffi/runtime/network/ucx/ucx.h"
#include "tests/cpp/emulation/processes/pipes.h"
#include "tests/cpp/gpu/require.h"

namespace {

using harness::Require;
using jax_ep::Inbox;
using jax_ep::kRailSlotBytes;
using jax_ep::RailRequests;
using jax_ep::Status;
using jax_ep::testing::Pipes;

constexpr int kRounds = 2000, kWarmUps = 200, kSlots = 8;
constexpr uint64_t kDeadlineNs = 5'000'000'000;

void Require(const Status& status, const char* what) {
  if (status.ok()) return;
  std::printf("FAIL %s: %s\n", what, status.message.c_str());
  std::fflush(stdout);
  std::_Exit(1);
}

__device__ uint64_t Nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// One thread. Returns false if no message comes.
__device__ bool Await(const uint64_t* flag, uint64_t number) {
  const uint64_t begin = Nanoseconds();
  while (jax_ep::LoadAcquireSystem(flag) != number) {
    if (Nanoseconds() - begin > kDeadlineNs) return false;
  }
  return true;
}

// Messages are numbered from `first`. `times` has the round trips of rank 0, in nanoseconds.
__global__ void Exchange(int rank, RailRequests* requests, const Inbox* inbox, uint64_t first,
                         uint64_t bytes, uint64_t* times, int* failed) {
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t number = first + static_cast<uint64_t>(round);
    const uint64_t slot = number % kSlots;
    const uint64_t begin = Nanoseconds();
    if (rank == 1 && !Await(&inbox->rail_messages[slot], number)) break;
    jax_ep::StoreReleaseSystem(&requests->messages[slot], jax_ep::RequestOfMessage(number, bytes));
    if (rank == 0 && !Await(&inbox->rail_messages[slot], number)) break;
    times[round] = Nanoseconds() - begin;
    if (round == kRounds - 1) *failed = 0;
  }
}

class Side {
 public:
  Side(Pipes* pipes, int rank, const std::string& folder) : pipes_(pipes), rank_(rank) {
    Require(cudaSetDevice(rank), "a GPU");
    Require(cudaMalloc(&memory_, kBytes), "memory");
    Require(cudaMemset(memory_, 0, kBytes), "memory");
    Require(cudaDeviceSynchronize(), "memory");
    Require(cudaHostAlloc(&requests_, sizeof *requests_, cudaHostAllocMapped), "requests");
    *requests_ = {};
    Require(cudaHostAlloc(&times_, kRounds * sizeof *times_ + sizeof(int), cudaHostAllocMapped),
            "times");
    Require(jax_ep::UseUcx(folder), "UCX");
    Require(jax_ep::Networks::OfProcess().Find(rank, &network_), "a network");
    std::string offer, name;
    Require(network_->Register(memory_, kBytes, &offer), "registration");
    pipes_->Send(offer);
    pipes_->Send(std::to_string(reinterpret_cast<uint64_t>(memory_)));
    int partner = 0;
    Require(network_->Open(pipes_->Receive(), &partner, &name), "a connection");
    if (rank == 0) std::printf("%s\n", name.c_str());
    const uint64_t there = std::stoull(pipes_->Receive());
    const jax_ep::RailLayout layout = {jax_ep::Domains(2, 1), rank, kSlots};
    sender_ = std::make_shared<jax_ep::RailSender>(
        requests_, layout, Addresses(reinterpret_cast<uint64_t>(memory_)),
        std::vector<int>{partner}, std::vector<jax_ep::RankMemoryAddresses>{Addresses(there)});
    network_->thread().Add(sender_);
  }

  void Measure(uint64_t bytes) {
    pipes_->Send("ready");
    pipes_->Receive();
    int* const failed = reinterpret_cast<int*>(times_ + kRounds);
    *failed = 1;
    Exchange<<<1, 1>>>(rank_, requests_, reinterpret_cast<Inbox*>(memory_), next_, bytes, times_,
                       failed);
    Require(cudaGetLastError(), "a launch");
    Require(cudaDeviceSynchronize(), "a kernel");
    next_ += kRounds;
    if (*failed != 0) Require(jax_ep::FailedPrecondition("no message came"), "an exchange");
    if (rank_ != 0) return;
    std::vector<uint64_t> times(times_ + kWarmUps, times_ + kRounds);
    std::sort(times.begin(), times.end());
    const auto microseconds = [&](size_t percent) {
      return static_cast<double>(times[times.size() * percent / 100]) / 2e3;
    };
    std::printf("TIME message of %llu bytes: p50 %.1f us, p99 %.1f us\n",
                static_cast<unsigned long long>(bytes), microseconds(50), microseconds(99));
    std::fflush(stdout);
  }

  void End() {
    pipes_->Send("over");
    pipes_->Receive();
    Require(network_->thread().Remove(sender_, 5), "the end");
  }

 private:
  static constexpr uint64_t kInboxBytes = (sizeof(Inbox) + 4095) / 4096 * 4096;
  static constexpr uint64_t kBytes = kInboxBytes + 2 * kSlots * kRailSlotBytes;

  static jax_ep::RankMemoryAddresses Addresses(uint64_t memory) {
    return {.inbox = memory, .rails = memory + kInboxBytes};
  }

  Pipes* const pipes_;
  const int rank_;
  void* memory_ = nullptr;
  RailRequests* requests_ = nullptr;
  uint64_t* times_ = nullptr;
  uint64_t next_ = 1;
  std::shared_ptr<jax_ep::DeviceNetwork> network_;
  std::shared_ptr<jax_ep::RailSender> sender_;
};

void Run(Pipes* pipes, int rank, const std::string& folder) {
  Side side(pipes, rank, folder);
  for (const uint64_t bytes :
       {uint64_t{0}, uint64_t{128}, uint64_t{14464}, uint64_t(kRailSlotBytes)}) {
    side.Measure(bytes);
  }
  side.End();
  std::fflush(stdout);
  std::_Exit(0);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::printf("usage: network_latency FOLDER_OF_LIBUCP\n");
    return 2;
  }
  setenv("UCX_MEMTYPE_CACHE", "n", 0);
  Pipes::Pair pipes = Pipes::Make();
  pid_t children[2];
  for (int rank = 0; rank < 2; ++rank) {
    children[rank] = fork();
    if (children[rank] == 0) Run(&pipes.side[rank], rank, argv[1]);
  }
  int failures = 0;
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    failures += status != 0;
  }
  std::printf(failures == 0 ? "OK\n" : "FAIL\n");
  return failures;
}
