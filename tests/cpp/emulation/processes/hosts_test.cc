// Tests what processes of several hosts tell each other: they agree, fail together, learn of
// deaths, and begin anew. The hosts are names in identities; their network is loopback.
#include <signal.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "ffi/runtime/transport/local/mesh_processes.h"
#include "ffi/runtime/transport/local/peer_group.h"
#include "ffi/runtime/transport/tcp/address.h"
#include "tests/cpp/emulation/cases.h"
#include "tests/cpp/emulation/processes/forks.h"
#include "tests/cpp/emulation/processes/shared_transport.h"
#include "tests/cpp/unit/check.h"
#include "tests/cpp/unit/runtime/own_network.h"

namespace jax_ep::testing {
namespace {

using Step = PeerGroup::Step;
using Contributions = std::vector<PeerGroup::Contribution>;

constexpr int kProcesses = 4, kPerHost = 2;

// A process with one rank, on the host of its number.
class Member {
 public:
  Member(int index, SharedExchange* exchange) {
    setenv("JAX_EP_NETWORK_INTERFACE", "lo", 0);
    setenv("JAX_EP_ENTRY_TIMEOUT_S", "20", 0);
    exchange->change = [index](Identity* identity) {
      const int host = index / kPerHost;
      std::strcpy(identity->boot_id, Concatenate("boot id of host ", host).c_str());
      std::strcpy(identity->host, Concatenate("node", host).c_str());
    };
    CHECK_OK(FindMeshProcesses(*exchange, {{0, index, SharedExchange::Communicator(0), "gpu"}},
                               kProcesses, true, &identities));
  }

  // Connects, and receives from now on.
  Status Join(int domain_size = kPerHost) {
    group = std::make_unique<PeerGroup>(7, identities);
    Status status = group->Connect(domain_size);
    if (!status.ok()) return status;
    group->Start([this](const std::string&, bool has_died) {
      const std::lock_guard lock(mutex_);
      has_died_ |= has_died;
      changed_.notify_all();
    });
    return {};
  }

  Status Gather(Step step, const std::string& bytes, Contributions* all, int num_handles = 0) {
    std::vector<MemoryHandle> handles;
    for (int i = 0; i < num_handles; ++i) handles.push_back({UniqueFd(memfd_create("test", 0))});
    return group->Gather(step, bytes, handles, all);
  }

  // Waits until the group knows of a death.
  bool AwaitDeath() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(10), [&] { return has_died_; });
  }

  std::vector<Identity> identities;
  std::unique_ptr<PeerGroup> group;  // lives until the process ends

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool has_died_ = false;
};

// Runs `child` in the processes of all hosts. None ends before the others are done, but for one
// that is killed.
void OnHosts(
    const std::function<void(Member& member, int index)>& child, int killed = -1,
    const std::function<void(int index)>& before = [](int) {}) {
  auto* const num_done = SharedBetweenForks<std::atomic<int>>();
  SharedExchange exchange;
  Forks forks(kProcesses, [&](int index) {
    before(index);
    child(*new Member(index, &exchange), index);
    ++*num_done;
    while (*num_done < kProcesses - (killed >= 0)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  forks.Await(30, killed);
}

// TCP ports of this process that listen.
int CountListeners() {
  int count = 0;
  for (int fd = 0; fd < 256; ++fd) {
    int domain = 0, is_listening = 0;
    socklen_t size = sizeof domain;
    getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size);
    getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &is_listening, &size);
    count += is_listening != 0 && domain != AF_UNIX;
  }
  return count;
}

void TestAgreement() {
  OnHosts([](Member& member, int index) {
    CHECK_OK(member.Join());
    Contributions all;
    for (int turn = 0; turn < 50; ++turn) {
      CHECK_OK(member.Gather(Step::kGeneration, Concatenate(index, " in ", turn), &all, 2));
      CHECK(all.size() == kProcesses);
      for (int process = 0; process < static_cast<int>(all.size()); ++process) {
        CHECK(all[process].bytes == Concatenate(process, " in ", turn));
        const bool is_local = process / kPerHost == index / kPerHost;
        CHECK(all[process].handles.size() == (is_local && process != index ? 2 : 0));
        for (const MemoryHandle& handle : all[process].handles) CHECK(handle.descriptor.is_open());
      }
    }
    uint64_t id = 0;
    CHECK_OK(member.group->AgreeOnCall("a call", &id));
    CHECK(id == 1);
    CHECK(CountListeners() == 1);
  });
}

// A port is open only where a group may span hosts.
void TestPorts() {
  for (const bool has_domains : {false, true}) {
    for (const bool has_hosts : {false, true}) {
      SharedExchange exchange;
      Forks forks(2, [&](int index) {
        exchange.change = [&](Identity* identity) {
          if (has_hosts && index == 1) std::strcpy(identity->boot_id, "elsewhere");
        };
        std::vector<Identity> identities;
        for (const bool now : {false, has_domains, has_domains}) {
          CHECK_OK(FindMeshProcesses(exchange, {{0, index, SharedExchange::Communicator(0), "gpu"}},
                                     2, now, &identities));
          const bool listens = now && has_hosts;
          CHECK(CountListeners() == listens);
          for (const Identity& identity : identities) {
            CHECK((identity.network_address[0] != '\0') == listens);
          }
        }
      });
      forks.Await(20);
    }
  }
}

void TestFailure() {
  OnHosts([](Member& member, int index) {
    CHECK_OK(member.Join());
    uint64_t id = 0;
    const Status status = member.group->AgreeOnCall(index < kPerHost ? "dispatch" : "combine", &id);
    CHECK_FAILS(status, "runs dispatch, while rank ");
    CHECK_FAILS(status, " on node1) runs combine");
    Contributions all;
    CHECK_FAILS(member.Gather(Step::kMapped, "", &all), "runs dispatch, while rank ");
    for (int era = 1; era < 4; ++era) {
      CHECK_OK(member.Gather(Step::kRelease, "", &all));
      if (index == era) member.group->ReportFailure(member.group->era(), Concatenate("era ", era));
      CHECK_FAILS(member.Gather(Step::kMapped, "", &all), Concatenate("era ", era));
    }
    CHECK_OK(member.Gather(Step::kRelease, "", &all));
    CHECK_OK(member.group->AgreeOnCall("dispatch", &id));
  });
}

// The others learn at once that a process has died, wherever it was.
void TestDeath() {
  auto* const num_ready = SharedBetweenForks<std::atomic<int>>();
  OnHosts(
      [&](Member& member, int index) {
        CHECK_OK(member.Join());
        uint64_t id = 0;
        CHECK_OK(member.group->AgreeOnCall("a call", &id));
        if (index == 3) {
          while (*num_ready < 3) std::this_thread::yield();
          raise(SIGKILL);
        }
        ++*num_ready;
        Contributions all;
        const double seconds = Seconds([&] {
          const Status status = member.Gather(Step::kMapped, "", &all);
          CHECK_FAILS(status, "rank 3 in process 3 (pid ");
          CHECK_FAILS(status, " on node1) has died: it has closed its socket");
        });
        CHECK(seconds < 5);
        CHECK(member.AwaitDeath());
        CHECK_FAILS(member.Gather(Step::kRelease, "", &all), "has died");
      },
      3);
}

// A host whose cable is pulled sends no end: silence tells of it, on both sides.
void TestPulledCable() {
  auto* const num_ready = SharedBetweenForks<std::atomic<int>>();
  setenv("JAX_EP_NETWORK_TIMEOUT_S", "1", 1);
  InOwnNetwork([&] {
    OnHosts([&](Member& member, int index) {
      CHECK_OK(member.Join());
      Contributions all;
      CHECK_OK(member.Gather(Step::kMapped, "", &all));
      ++*num_ready;
      while (*num_ready < kProcesses) std::this_thread::yield();
      if (index == 0) SetLoopback(false);
      const double seconds = Seconds([&] { CHECK(member.AwaitDeath()); });
      CHECK(seconds < 5);
      const Status status = member.Gather(Step::kMapped, "", &all);
      CHECK_FAILS(status, index < kPerHost
                              ? " on node1) has died, or the network to its host is cut"
                              : " on node0) has died, or the network to its host is cut");
    });
  });
  unsetenv("JAX_EP_NETWORK_TIMEOUT_S");
}

void TestExit() {
  auto* const num_ready = SharedBetweenForks<std::atomic<int>>();
  OnHosts([&](Member& member, int index) {
    CHECK_OK(member.Join());
    Contributions all;
    CHECK_OK(member.Gather(Step::kMapped, "", &all));
    ++*num_ready;  // a failure may overtake a third process's step
    while (*num_ready < kProcesses) std::this_thread::yield();
    if (index == 2) return Connections::OfProcess().Leave();
    CHECK_FAILS(member.Gather(Step::kMapped, "", &all), "on node1) has exited");
  });
}

void TestWithoutDomains() {
  OnHosts([](Member& member, int) {
    CHECK_FAILS(member.Join(0), "a rank group spans hosts: rank 0 in process 0 (pid ");
    CHECK_FAILS(member.Join(0), "Give nvlink_domain_size=2,");
    CHECK_FAILS(member.Join(4), "an NVLink domain of 4 ranks spans hosts: rank 0 in process 0");
  });
}

// A process of another host that has died, before the others connect with it or while they wait.
void TestNobodyListens() {
  auto* const num_ready = SharedBetweenForks<std::atomic<int>>();
  OnHosts(
      [&](Member& member, int index) {
        ++*num_ready;
        while (*num_ready < kProcesses) std::this_thread::yield();
        if (index == 3) raise(SIGKILL);
        std::shared_ptr<Connection> probe;
        while (
            ConnectStream(member.identities[3].network_address, "", std::chrono::seconds(1), &probe)
                .ok()) {
          std::this_thread::yield();
        }
        Contributions all;
        Status status = member.Join();
        // The kernel may close a dead process's socket for its own host last.
        if (status.ok() && index == 2) status = member.Gather(Step::kMapped, "", &all);
        CHECK(!status.ok());
        if (index == 0) {
          CHECK_FAILS(status, "node0) (127.0.0.1:");
          CHECK_FAILS(status, "cannot connect with rank 3 in process 3 (pid ");
          CHECK_FAILS(status, "on node1) (127.0.0.1:");
          CHECK_FAILS(status, "Connection refused");
          CHECK_FAILS(status, "JAX_EP_NETWORK_INTERFACE");
        }
      },
      3);
}

// A process that cannot listen says why, the others say which one it is, and all fail.
void TestWrongInterface() {
  OnHosts(
      [](Member& member, int index) {
        Contributions all;
        Status status = member.Join();
        if (status.ok()) status = member.Gather(Step::kMapped, "", &all);
        CHECK_FAILS(status, index == 3   ? "the network: JAX_EP_NETWORK_INTERFACE is \"none7\""
                            : index == 2 ? "cannot connect with rank "  // has been told
                                         : "cannot connect with rank 3 in process 3 (pid ");
        if (index < 2) CHECK_FAILS(status, "it has no network address; its own error tells why");
      },
      -1,
      [](int index) {
        if (index == 3) setenv("JAX_EP_NETWORK_INTERFACE", "none7", 1);
      });
}

// Strangers say all kinds of things to the ports, and nobody minds.
void TestStrangers() {
  OnHosts([](Member& member, int index) {
    std::mt19937 random(static_cast<unsigned>(index) + std::random_device{}());
    std::vector<UniqueFd> open;
    const auto annoy = [&] {
      for (int i = 0; i < 400; ++i) {
        const Identity& victim = member.identities[random() % kProcesses];
        SocketAddress to;
        CHECK_OK(SocketAddress::Parse(victim.network_address, &to));
        UniqueFd stranger(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
        if (connect(stranger.get(), to.get(), to.size()) != 0) continue;
        std::string bytes(random() % 100, '\0');
        for (char& byte : bytes) byte = static_cast<char>(random());
        if (random() % 8 == 0) bytes.insert(0, victim.secret, sizeof victim.secret - 1);
        // One that knows the secret is no process either.
        if (random() % 8 == 0) bytes.insert(0, victim.secret, sizeof victim.secret);
        if (!bytes.empty()) send(stranger.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
        if (random() % 3 == 0) open.push_back(std::move(stranger));
      }
    };
    annoy();
    CHECK_OK(member.Join());
    annoy();
    Contributions all;
    for (int turn = 0; turn < 10; ++turn) CHECK_OK(member.Gather(Step::kMapped, "", &all, 1));
  });
}

}  // namespace
}  // namespace jax_ep::testing

int main(int argc, char** argv) {
  using namespace jax_ep::testing;
  return RunCases({{"agreement", TestAgreement},
                   {"ports", TestPorts},
                   {"failure", TestFailure},
                   {"death", TestDeath},
                   {"a pulled cable", TestPulledCable},
                   {"exit", TestExit},
                   {"a group without domains", TestWithoutDomains},
                   {"nobody listens", TestNobodyListens},
                   {"a wrong interface", TestWrongInterface},
                   {"strangers", TestStrangers}},
                  argc, argv);
}
