#include "ffi/handlers/operations.h"

#include <algorithm>
#include <mutex>
#include <set>
#include <vector>

#include "ffi/runtime/cuda/device_cuda.h"

namespace jax_ep {
namespace {

// Loads the kernels of each operation once, in the order of kAllHandlers.
Status LoadKernels(bool also_of_transfers) {
  std::vector<Status (*)()> loaded;
  for (const auto& make : kAllHandlers) {
    const Handlers operation = make();
    if (operation.communicates && !also_of_transfers) continue;
    if (std::ranges::find(loaded, operation.load_kernels) != loaded.end()) continue;
    loaded.push_back(operation.load_kernels);
    if (Status status = operation.load_kernels(); !status.ok()) return status;
  }
  return {};
}

}  // namespace

Status LoadAllKernels() { return LoadKernels(true); }

Status LoadLocalKernelsOnce(int32_t device) {
  static std::mutex mutex;
  static auto& loaded = *new std::set<int32_t>;  // never destroyed: threads may outlive main
  const std::lock_guard lock(mutex);
  if (loaded.contains(device)) return {};
  const CurrentDevice current(device);
  Status status = current.status();
  if (status.ok()) status = LoadKernels(false);
  if (status.ok()) loaded.insert(device);
  return status;
}

}  // namespace jax_ep
