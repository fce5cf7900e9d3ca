// Device memory of the emulated CUDA runtime.
#include <sys/mman.h>

#include <deque>
#include <map>
#include <mutex>
#include <utility>

#include "cuda_runtime_api.h"

namespace {

// Freed memory whose addresses are not used again yet.
constexpr size_t kQuarantine = 512;

std::mutex mutex;
std::map<void*, size_t> allocations;
std::deque<std::pair<void*, size_t>> quarantine;
size_t allocated = 0;

}  // namespace

size_t emulation::AllocatedBytes() {
  const std::lock_guard lock(mutex);
  return allocated;
}

cudaError_t cudaMalloc(void** address, size_t bytes) {
  if (const auto on_malloc = emulation::faults.on_malloc)
    on_malloc();  // a copy: it may reset itself
  int device = 0;
  cudaGetDevice(&device);
  if (device == emulation::faults.full_device && bytes > emulation::faults.free_bytes) {
    return cudaErrorMemoryAllocation;
  }
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return cudaErrorMemoryAllocation;
  // Not zeros: device memory is uninitialized. The rest of a large allocation is left to the
  // system.
  std::memset(memory, 0xa5, std::min(bytes, size_t{1} << 19));
  *address = memory;
  const std::lock_guard lock(mutex);
  allocations[memory] = bytes;
  allocated += bytes;
  return cudaSuccess;
}

cudaError_t cudaFree(void* address) {
  const std::lock_guard lock(mutex);
  const auto found = allocations.find(address);
  if (found == allocations.end()) return cudaErrorInvalidValue;
  const auto [memory, bytes] = *found;
  allocations.erase(found);
  allocated -= bytes;
  mprotect(memory, bytes, PROT_NONE);
  quarantine.push_back({memory, bytes});
  if (quarantine.size() > kQuarantine) {
    munmap(quarantine.front().first, quarantine.front().second);
    quarantine.pop_front();
  }
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = size_t{1} << 37;
  *free = emulation::faults.full_device >= 0 ? emulation::faults.free_bytes : *total;
  return cudaSuccess;
}
