// Tests meshes over several processes and hosts: which of them a rank group may span, and what is
// known of a mesh.
#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "ffi/runtime/transport/local/group_processes.h"
#include "ffi/runtime/transport/local/mesh_processes.h"
#include "tests/cpp/emulation/processes/process.h"

namespace jax_ep::testing {
namespace {

using RankGroups = std::vector<std::vector<int64_t>>;

// Runs a call of several groups, some of which span processes, again and again.
void RunGroups(Process& process, const RankGroups& groups, int num_tokens, uintptr_t mesh) {
  const LocalRanks local = process.local();
  const auto is_local = [&](int64_t id) {
    return id >= local.first && id < local.first + local.count;
  };
  const auto site =
      std::make_shared<CallSite>(groups, 0, DispatchProgram::kKernels, local.transport);
  struct LocalDevice {
    DispatchProgram* program;
    int rank;
  };
  std::vector<std::unique_ptr<DispatchProgram>> programs;
  std::map<int, LocalDevice> devices;
  for (const std::vector<int64_t>& ids : groups) {
    const auto first = std::find_if(ids.begin(), ids.end(), is_local);
    if (first == ids.end()) continue;
    const int rank = static_cast<int>(first - ids.begin());
    const int count = static_cast<int>(std::count_if(ids.begin(), ids.end(), is_local));
    const int device = static_cast<int>(*first) - local.first;
    programs.push_back(std::make_unique<DispatchProgram>(static_cast<int>(ids.size()), num_tokens,
                                                         num_tokens < 10, device, Lane{0, 2, 2},
                                                         LocalRanks{rank, count, local.transport}));
    programs.back()->site = site;
    for (int i = 0; i < count; ++i) devices[device + i] = {programs.back().get(), rank + i};
  }
  for (int repeat = 0; repeat < 3; ++repeat) {
    const int64_t run = NextRun();
    for (int i = 0; i < local.count; ++i) {
      if (!site->HasRank(i)) site->Announce(run);
    }
    std::vector<std::jthread> threads;
    for (const auto& [device, of] : devices) {
      threads.emplace_back([&, device, of] {
        cudaSetDevice(device);
        const Status status = site->Enter(run, {device,
                                                StreamOf(device),
                                                local.first + device,
                                                of.program->workspace_bytes(),
                                                {},
                                                SharedExchange::Communicator(mesh),
                                                "a call"});
        CHECK_OK(status);
        if (status.ok()) CHECK_OK(of.program->Launch(of.rank));
      });
    }
    threads.clear();
    for (const auto& [device, of] : devices) {
      cudaStreamSynchronize(StreamOf(device));
      CHECK(of.program->IsRight(of.rank));
    }
    for (auto& program : programs) program->Clear();
  }
}

void TestSeveralGroups() {
  const struct {
    Layout layout;
    RankGroups groups;
  } cases[] = {{{2, 2}, {{0, 2}, {1, 3}}},           // all span processes
               {{2, 2}, {{0, 1}, {2, 3}}},           // none does
               {{2, 2}, {{2, 0}, {3, 1}}},           // unlike the order of processes
               {{3, 2}, {{0, 1, 2}, {3, 4, 5}}},     // a process has a part of two
               {{2, 3}, {{0, 1}, {2, 3}, {4, 5}}}};  // some do
  uintptr_t mesh = 0;
  SharedExchange exchange;
  for (const auto& [layout, groups] : cases) {
    Forks forks(layout.num_processes, [&](int index) {
      Process process(layout, index, &exchange, mesh + 1);
      for (int num_tokens : {6, 60}) {
        RunGroups(process, groups, num_tokens, mesh);
        Groups::OfProcess().Release();
      }
    });
    forks.Await(30);
    ++mesh;
  }
}

// A mesh over two hosts runs, as each group is on one of them.
void TestTwoHosts() {
  SharedExchange exchange;
  Forks forks(4, [&](int index) {
    if (index >= 2) {
      exchange.change = [](Identity* identity) { std::strcpy(identity->boot_id, "elsewhere"); };
    }
    Process process({4, 1}, index, &exchange, 1);
    RunGroups(process, {{0, 1}, {3, 2}}, 6, 0);
    Groups::OfProcess().Release();
  });
  forks.Await(30);
}

// A communicator may have the address of one that has ended.
void TestMeshesAreForgotten() {
  struct Counting : Exchange {
    Status AllGather(const std::vector<Endpoint>& local, const Identity& self, size_t num_devices,
                     std::vector<Identity>* identities) override {
      ++num_gathers;
      identities->assign(num_devices, local[0].IdentityIn(self));
      return {};
    }
    int num_gathers = 0;
  };
  Forks forks(1, [](int) {
    Counting exchange;
    std::vector<Identity> identities;
    for (const int expected : {1, 1, 2}) {
      if (expected == 2) ForgetMeshes();
      CHECK_OK(FindMeshProcesses(exchange, {{0, 0, SharedExchange::Communicator(0), "gpu"}}, 2,
                                 true, &identities));
      CHECK(exchange.num_gathers == expected && identities.size() == 2);
    }
  });
  forks.Await(30);
}

void TestOtherHostAndVersion() {
  SharedExchange exchange;
  for (const bool is_version : {false, true}) {
    Forks forks(2, [&](int index) {
      exchange.change = [&](Identity* identity) {
        if (index == 0) return;
        if (is_version) {
          std::strcpy(identity->version, "9.9");
        } else {
          std::strcpy(identity->boot_id, "elsewhere");
          std::strcpy(identity->host, "node9");
        }
      };
      Process process({2, 1}, index, &exchange, 1);
      for (const Status& status : process.Dispatch(6, false).Run()) {
        CHECK_FAILS(status, is_version ? "9.9" : "on node9)");
        CHECK_FAILS(status, is_version ? "Install the same version" : "implementation=\"xla\"");
      }
    });
    forks.Await(30);
    new (&exchange) SharedExchange;
  }
}

// The error of a group over hosts has the value to give.
void TestDomainsOfHosts() {
  const std::pair<std::vector<int>, const char*> cases[] = {
      {{0, 1}, "Give nvlink_domain_size=1,"},
      {{0, 0, 1, 1}, "Give nvlink_domain_size=2,"},
      {{0, 0, 0, 0, 1, 1}, "Give nvlink_domain_size=2,"},
      {{0, 1, 0, 1}, "not next to each other"},
  };
  for (const auto& [hosts, expected] : cases) {
    std::vector<Identity> ranks;
    for (const int host : hosts) {
      Identity rank = ThisProcess();
      rank.process += ranks.size();
      if (host != 0) std::strcpy(rank.boot_id, "elsewhere");
      ranks.push_back(rank);
    }
    const GroupProcesses processes(ranks);
    CHECK_FAILS(processes.CheckHosts(0), "a rank group spans hosts: rank 0 in");
    CHECK_FAILS(processes.CheckHosts(0), expected);
    const int num_ranks = static_cast<int>(hosts.size());
    for (int size = 1; size < num_ranks; ++size) {
      const auto is_apart = [&](int rank) { return hosts[rank] != hosts[rank - rank % size]; };
      bool fits = true;
      for (int rank = 0; rank < num_ranks; ++rank) fits &= !is_apart(rank);
      if (fits) {
        CHECK_OK(processes.CheckHosts(size));
      } else {
        CHECK_FAILS(processes.CheckHosts(size),
                    Concatenate("an NVLink domain of ", size, " ranks spans hosts: rank "));
        CHECK_FAILS(processes.CheckHosts(size), expected);
      }
    }
  }
}

}  // namespace
}  // namespace jax_ep::testing

int main(int argc, char** argv) {
  using namespace jax_ep::testing;
  RegisterKernels();
  return RunCases({{"several groups", TestSeveralGroups},
                   {"two hosts", TestTwoHosts},
                   {"domains of hosts", TestDomainsOfHosts},
                   {"meshes are forgotten", TestMeshesAreForgotten},
                   {"another host, another version", TestOtherHostAndVersion}},
                  argc, argv);
}
