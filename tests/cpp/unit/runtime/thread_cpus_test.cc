#include "ffi/runtime/network/thread_cpus.h"

#include <sched.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpp/unit/check.h"

namespace jax_ep {
namespace {

using Cpus = std::vector<int>;

void TestParse() {
  Cpus cpus;
  CHECK(ParseCpus("0-3,8", &cpus) && cpus == (Cpus{0, 1, 2, 3, 8}));
  CHECK(ParseCpus("7", &cpus) && cpus == Cpus{7});
  for (const char* text : {"", "a", "1-", "-1", "3-1", "1,", "1;2", "0-5000", " 1", "1 "}) {
    CHECK(!ParseCpus(text, &cpus));
  }
}

void TestVariable() {
  NetworkCpus cpus;
  CHECK_OK(ReadNetworkCpus(&cpus));
  CHECK(cpus.are_near_the_gpu);
  setenv("JAX_EP_NETWORK_CPUS", "any", 1);
  CHECK_OK(ReadNetworkCpus(&cpus));
  CHECK(!cpus.are_near_the_gpu && cpus.given.empty());
  setenv("JAX_EP_NETWORK_CPUS", "2,4-5", 1);
  CHECK_OK(ReadNetworkCpus(&cpus));
  CHECK(!cpus.are_near_the_gpu && cpus.given == (Cpus{2, 4, 5}));
  setenv("JAX_EP_NETWORK_CPUS", "near", 1);
  CHECK_FAILS(ReadNetworkCpus(&cpus), "JAX_EP_NETWORK_CPUS is \"near\"; expected CPUs such as");
}

void TestNear() {
  const auto folder =
      std::filesystem::temp_directory_path() / ("jax_ep_cpus_" + std::to_string(getpid()));
  std::filesystem::create_directories(folder / "0000:1b:00.0");
  std::ofstream(folder / "0000:1b:00.0" / "local_cpulist") << "0-1,48-49\n";
  CHECK(CpusNear("0000:1B:00.0", folder) == (Cpus{0, 1, 48, 49}));
  CHECK(CpusNear("0000:1C:00.0", folder).empty());
  std::filesystem::remove_all(folder);
}

Cpus OwnCpus() {
  cpu_set_t set;
  CHECK(sched_getaffinity(0, sizeof set, &set) == 0);
  Cpus cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  }
  return cpus;
}

void TestBind() {
  const Cpus before = OwnCpus();
  const int last = before.back();
  std::thread([&] {
    CHECK(!BindThread({}));
    CHECK(!BindThread({CPU_SETSIZE - 1}) || before == Cpus{CPU_SETSIZE - 1});
    CHECK(OwnCpus() == before);
    CHECK(BindThread({last, CPU_SETSIZE - 1}));
    CHECK(OwnCpus() == Cpus{last});
    if (before.size() > 1) {
      CHECK(!BindThread({before.front()}));
      CHECK(OwnCpus() == Cpus{last});
    }
  }).join();
  CHECK(OwnCpus() == before);
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::TestParse();
  jax_ep::TestVariable();
  jax_ep::TestNear();
  jax_ep::TestBind();
  return jax_ep::testing::Finish();
}
