// One of several processes of a test, with devices of its own.
#ifndef JAX_EP_TESTS_CPP_EMULATION_PROCESSES_PROCESS_H_
#define JAX_EP_TESTS_CPP_EMULATION_PROCESSES_PROCESS_H_

#include <cstdlib>
#include <cstring>
#include <functional>

#include "ffi/runtime/groups/groups.h"
#include "ffi/runtime/transport/local/cuda_transport.h"
#include "tests/cpp/emulation/cases.h"
#include "tests/cpp/emulation/processes/forks.h"
#include "tests/cpp/emulation/processes/shared_transport.h"
#include "tests/cpp/emulation/programs/dispatch_program.h"
#include "tests/cpp/emulation/reports.h"
#include "tests/cpp/emulation/streams.h"
#include "tests/cpp/emulation/transfer/register_kernels.h"
#include "tests/cpp/unit/check.h"

namespace jax_ep::testing {

struct Layout {
  int num_processes;
  int ranks_per_process;
  bool has_hosts = false;  // each process pretends to be on a host of its own
  int num_ranks() const { return num_processes * ranks_per_process; }
};

// A process's side of a test.
class Process {
 public:
  Process(Layout layout, int index, SharedExchange* exchange, uint64_t seed)
      : transport{exchange, {&memory, CudaIpcMemory()}}, layout_(layout), index_(index) {
    emulation::settings.seed = seed * 31 + static_cast<uint64_t>(index);
    if (layout.has_hosts) {
      exchange->change = [index](Identity* identity) {
        std::strcpy(identity->boot_id, Concatenate("boot id of host ", index).c_str());
      };
    }
    // Kernels share few CPUs with many others: only a test of deadlines has short ones.
    for (const char* name :
         {"JAX_EP_ENTRY_TIMEOUT_S", "JAX_EP_PROGRESS_TIMEOUT_S", "JAX_EP_WARN_AFTER_S"}) {
      setenv(name, "1000000", 1);
    }
  }

  LocalRanks local() const {
    return {index_ * layout_.ranks_per_process, layout_.ranks_per_process, &transport,
            SharedExchange::Communicator(0)};
  }

  DispatchProgram Dispatch(int num_tokens, bool allow_low_latency, int64_t lane = 0,
                           int domain_size = 0) {
    return {layout_.num_ranks(), num_tokens, allow_low_latency, 0,
            {lane, 2, 2},        local(),    domain_size};
  }

  SharedMemory memory;
  Transport transport;

 private:
  const Layout layout_;
  const int index_;
};

// Runs `child` in two processes of one rank each.
inline void InTwo(const std::function<void(Process& process, int index)>& child) {
  SharedExchange exchange;
  Forks forks(2, [&](int index) {
    Process process({2, 1}, index, &exchange, 1);
    child(process, index);
  });
  forks.Await(30);
}

// The group works again after a release.
inline void CheckAfterRelease(Process& process) {
  Groups::OfProcess().Release();
  ProcessMailbox().Take();
  process.Dispatch(6, false).Check();
  Groups::OfProcess().Release();
}

}  // namespace jax_ep::testing

#endif  // JAX_EP_TESTS_CPP_EMULATION_PROCESSES_PROCESS_H_
