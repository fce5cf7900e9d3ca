#include "ffi/runtime/network/thread_cpus.h"

#include <sched.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <fstream>

namespace jax_ep {

bool ParseCpus(const std::string& text, std::vector<int>* cpus) {
  cpus->clear();
  const char* at = text.data();
  const char* const end = at + text.size();
  while (true) {
    int first = 0;
    std::from_chars_result read = std::from_chars(at, end, first);
    if (read.ec != std::errc()) return false;
    int last = first;
    if (read.ptr != end && *read.ptr == '-') read = std::from_chars(read.ptr + 1, end, last);
    if (read.ec != std::errc() || first < 0 || last < first || last >= CPU_SETSIZE) return false;
    for (int cpu = first; cpu <= last; ++cpu) cpus->push_back(cpu);
    if (read.ptr == end) return true;
    if (*read.ptr != ',') return false;
    at = read.ptr + 1;
  }
}

Status ReadNetworkCpus(NetworkCpus* cpus) {
  const char* const text = std::getenv("JAX_EP_NETWORK_CPUS");
  *cpus = {};
  if (text == nullptr || *text == '\0') return {};
  cpus->are_near_the_gpu = false;
  if (std::string(text) == "any" || ParseCpus(text, &cpus->given)) return {};
  return InvalidArgument("jax_ep: the environment variable JAX_EP_NETWORK_CPUS is \"", text,
                         "\"; expected CPUs such as 0-15,32, any, or nothing for those next to "
                         "each GPU");
}

std::vector<int> CpusNear(const std::string& pci_device, const std::string& folder) {
  std::string name = pci_device;  // CUDA writes capitals
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  std::ifstream file(folder + "/" + name + "/local_cpulist");
  std::string list;
  std::vector<int> cpus;
  if (!(file >> list) || !ParseCpus(list, &cpus)) return {};
  return cpus;
}

bool BindThread(const std::vector<int>& cpus) {
  cpu_set_t allowed, chosen;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return false;
  CPU_ZERO(&chosen);
  for (const int cpu : cpus) {
    if (CPU_ISSET(cpu, &allowed)) CPU_SET(cpu, &chosen);
  }
  return CPU_COUNT(&chosen) > 0 && sched_setaffinity(0, sizeof chosen, &chosen) == 0;
}

}  // namespace jax_ep
