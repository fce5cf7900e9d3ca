// Joins the NVLink domains of this process's groups by NVSHMEM, whose host library is a fake
// (tests/cpp/fakes). Kernels put by the functions here, late and in any order.
#ifndef JAX_EP_TESTS_CPP_EMULATION_PROCESSES_FAKE_NVSHMEM_H_
#define JAX_EP_TESTS_CPP_EMULATION_PROCESSES_FAKE_NVSHMEM_H_

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/runtime/network/networks.h"
#include "ffi/runtime/network/nvshmem/nvshmem_network.h"
#include "tests/cpp/emulation/programs/dispatch_program.h"

namespace jax_ep::testing {

// The puts of a process, which a thread lands.
class LatePuts {
 public:
  // Never destroyed: its thread runs until the process ends.
  static LatePuts& OfProcess() {
    static auto* const puts = new LatePuts;
    return *puts;
  }

  void Use(const NvshmemLibrary* library) {
    library_ = library;
    random_.seed(static_cast<uint64_t>(getpid()));
    std::thread([this] { Loop(); }).detach();
  }

  void Start(const NvshmemPutParams& params) {
    const std::lock_guard lock(mutex_);
    pending_.push_back(params);
    ++num_puts_;
  }
  bool IsIdle() {
    const std::lock_guard lock(mutex_);
    return pending_.empty();
  }
  uint64_t num_puts() const { return num_puts_; }

 private:
  void Loop() {
    while (true) {
      {
        const std::lock_guard lock(mutex_);
        std::shuffle(pending_.begin(), pending_.end(), random_);
        // Now and then most of them wait.
        const uint64_t odds = random_() % 8 == 0 ? 16 : 2;
        std::erase_if(pending_, [&](const NvshmemPutParams& put) {
          if (random_() % odds != 0) return false;
          Land(put);
          return true;
        });
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

  void Land(const NvshmemPutParams& put) {
    const auto there = [&](uint64_t address) {
      return library_->nvshmem_ptr(reinterpret_cast<const void*>(address), put.pe);
    };
    if (put.bytes > 0) {
      std::memcpy(there(put.to), reinterpret_cast<const void*>(put.from), put.bytes);
    }
    std::atomic_ref(*static_cast<uint64_t*>(there(put.flag)))
        .store(put.value, std::memory_order_release);
  }

  const NvshmemLibrary* library_ = nullptr;
  std::mutex mutex_;
  std::mt19937_64 random_;
  std::vector<NvshmemPutParams> pending_;
  std::atomic<uint64_t> num_puts_ = 0;
};

// Call it in a fork, before it has groups. `folder` has the fake library.
inline void UseFakeNvshmem(const std::string& folder) {
  DispatchProgram::rail_slots = 0;  // a group knows the rings of its rails
  NvshmemOptions options;
  options.folder = folder;
  options.check = [](int /*device*/) { return Status{}; };
  options.on_device = [](int /*device*/, const std::function<Status()>& function) {
    return function();
  };
  options.load_kernels = [](const NvshmemLibrary& library) {
    LatePuts::OfProcess().Use(&library);
    return library.nvshmemx_cumodule_init(nullptr) == 0 ? Status{} : FailedPrecondition("no init");
  };
  auto* const world = new NvshmemWorld(std::move(options));  // lives as long as the process
  Networks::OfProcess().Use([world](int /*device*/, std::unique_ptr<Network>* network) {
    NvshmemStream stream;
    stream.put = [](const NvshmemPutParams& params) {
      if (params.flag != 0) LatePuts::OfProcess().Start(params);
      return Status{};
    };
    stream.query = [](bool* is_idle) {
      *is_idle = LatePuts::OfProcess().IsIdle();
      return Status{};
    };
    *network = std::make_unique<NvshmemNetwork>(world, std::move(stream));
    return Status{};
  });
  Networks::OfProcess().UseJoin([world](const NetworkMembers& members, const Status& own) {
    return world->Join(members, own);
  });
}

}  // namespace jax_ep::testing

namespace jax_ep {

// The functions of rail_network.cuh, on which the kernels are linked.
void NvshmemPut(void* to, const void* from, uint64_t bytes, uint64_t* flag, uint64_t value,
                int pe) {
  testing::LatePuts::OfProcess().Start({.to = reinterpret_cast<uint64_t>(to),
                                        .from = reinterpret_cast<uint64_t>(from),
                                        .bytes = bytes,
                                        .flag = reinterpret_cast<uint64_t>(flag),
                                        .value = value,
                                        .pe = pe});
}

void NvshmemSet(uint64_t* flag, uint64_t value, int pe) {
  NvshmemPut(nullptr, nullptr, 0, flag, value, pe);
}

}  // namespace jax_ep

#endif  // JAX_EP_TESTS_CPP_EMULATION_PROCESSES_FAKE_NVSHMEM_H_
