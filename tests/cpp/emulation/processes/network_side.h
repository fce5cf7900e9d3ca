// One of two processes that put into each other's memory over a network: rings of slots with a flag
// and a credit each. A thread polls flags and checks bytes, as a kernel would; the caller's thread
// has the network.
#ifndef JAX_EP_TESTS_CPP_EMULATION_PROCESSES_NETWORK_SIDE_H_
#define JAX_EP_TESTS_CPP_EMULATION_PROCESSES_NETWORK_SIDE_H_

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "ffi/runtime/network/ucx/ucx.h"
#include "tests/cpp/emulation/processes/pipes.h"
#include "tests/cpp/unit/check.h"

namespace jax_ep::testing {

class NetworkSide {
 public:
  static constexpr int kSlots = 32;
  static constexpr size_t kSlotBytes = 256 * 1024;

  // The partner's is connection 1 where the first one is to the process itself.
  NetworkSide(Pipes* pipes, int rank, const UcxOptions& options, bool has_other = false)
      : pipes_(pipes), rank_(rank) {
    CHECK_OK(MakeUcxNetwork(options, &network_));
    if (network_ != nullptr) Connect(has_other);
  }

  Network& network() { return *network_; }
  bool is_connected() const { return memory_ >= 0; }
  uint64_t partner() const { return partner_; }
  int memory() const { return memory_; }
  char* own() { return area_.get(); }
  char* source(int slot) { return area_.get() + kSource + slot * kSlotBytes; }

  // Places in either process, from the beginning of its memory.
  static uint64_t Slot(int slot) { return slot * kSlotBytes; }
  static uint64_t Flag(int slot) { return kSlots * kSlotBytes + slot * 64; }
  static uint64_t Credit(int slot) { return Flag(kSlots) + slot * 64; }

  uint64_t Read(uint64_t place) {
    return std::atomic_ref(*reinterpret_cast<uint64_t*>(own() + place))
        .load(std::memory_order_acquire);
  }

  // All bytes of a word are those of its lap, so that a word that is half written shows.
  static uint64_t Word(int lap) { return uint64_t{0x0101010101010101} * (lap % 250); }

  // Sends and receives this many more messages. Returns the network's error.
  Status Exchange(int count, double seconds = 20) {
    std::atomic<int> received = 0;
    std::atomic<bool> is_over = false;
    const int first = std::exchange(next_, next_ + count);
    received = first;
    std::thread receiver([&] {
      for (int n = first; n < next_ && !is_over; ++n) Receive(n, &received, is_over);
    });
    const auto deadline = After(seconds);
    Status status;
    int sent = first, credited = first;
    while (status.ok() && (sent < next_ || credited < next_ || !network_->IsIdle())) {
      status = network_->Progress();
      if (status.ok() && credited < received) status = SendCredit(credited++);
      if (status.ok() && sent < next_ && HasCredit(sent)) status = Send(sent++);
      if (std::chrono::steady_clock::now() > deadline) status = FailedPrecondition("not in time");
      std::this_thread::yield();
    }
    is_over = !status.ok();
    receiver.join();
    return status;
  }

  // Makes progress until the partner has come here, too.
  void Meet() {
    pipes_->Send("done");
    while (!pipes_->HasMessage()) CHECK_OK(network_->Progress());
    CHECK(pipes_->Receive() == "done");
  }

  Status PutWords(uint64_t place, uint64_t value, size_t bytes = 0) {
    return network_->Start({memory_, source(0), partner_, bytes, partner_ + place, value});
  }

 private:
  static constexpr uint64_t kSource = kSlots * (kSlotBytes + 128);
  static constexpr uint64_t kBytes = kSource + kSlots * kSlotBytes;

  static std::chrono::steady_clock::time_point After(double seconds) {
    return std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::nanoseconds>(
                                                  std::chrono::duration<double>(seconds));
  }

  static size_t SizeOf(int n) {
    constexpr size_t kSizes[] = {0, kSlotBytes, 8, 100, 65'536, 1, kSlotBytes - 1, 4096, 30'001};
    return kSizes[n % std::size(kSizes)];
  }

  static unsigned char ByteOf(int rank, int n, size_t i) {
    return static_cast<unsigned char>(i * 7 + i / 251 + n * 31 + rank * 101);
  }

  void Connect(bool has_other) {
    area_.reset(static_cast<char*>(std::aligned_alloc(64, kBytes)));
    std::fill_n(area_.get(), kBytes, 0);
    std::string address, key;
    CHECK_OK(network_->Address(&address));
    CHECK_OK(network_->Register(area_.get(), kBytes, &key));
    pipes_->Send(address);
    pipes_->Send(key);
    pipes_->Send(std::to_string(reinterpret_cast<uint64_t>(area_.get())));
    int connection = -1;
    if (has_other) CHECK_OK(network_->Connect(address, &connection));
    CHECK_OK(network_->Connect(pipes_->Receive(), &connection));
    CHECK(connection == has_other);
    CHECK_OK(network_->Open(connection, pipes_->Receive(), &memory_));
    partner_ = std::stoull(pipes_->Receive());
  }

  static int LapOf(int n) { return n / kSlots + 1; }
  bool HasCredit(int n) { return Read(Credit(n % kSlots)) == Word(LapOf(n) - 1); }

  Status Send(int n) {
    const int slot = n % kSlots;
    const size_t bytes = SizeOf(n);
    char* const from = source(slot);
    for (size_t i = 0; i < bytes; ++i) from[i] = static_cast<char>(ByteOf(rank_, n, i));
    return network_->Start(
        {memory_, from, partner_ + Slot(slot), bytes, partner_ + Flag(slot), Word(LapOf(n))});
  }

  Status SendCredit(int n) { return PutWords(Credit(n % kSlots), Word(LapOf(n))); }

  void Receive(int n, std::atomic<int>* received, const std::atomic<bool>& is_over) {
    const int slot = n % kSlots;
    uint64_t word = Read(Flag(slot));
    for (; word == Word(LapOf(n) - 1) && !is_over; word = Read(Flag(slot))) {
      std::this_thread::yield();
    }
    if (is_over) return;
    CHECK(word == Word(LapOf(n)));
    const auto* const bytes = reinterpret_cast<const unsigned char*>(own() + Slot(slot));
    size_t wrong = 0;
    for (size_t i = 0; i < SizeOf(n); ++i) wrong += bytes[i] != ByteOf(1 - rank_, n, i);
    CHECK(wrong == 0);
    *received = n + 1;
  }

  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };

  Pipes* const pipes_;
  const int rank_;
  std::unique_ptr<char, Free> area_;  // outlives the network, which reads it
  std::unique_ptr<Network> network_;
  int memory_ = -1;
  int next_ = 0;          // message
  uint64_t partner_ = 0;  // where the partner's memory begins
};

}  // namespace jax_ep::testing

#endif  // JAX_EP_TESTS_CPP_EMULATION_PROCESSES_NETWORK_SIDE_H_
