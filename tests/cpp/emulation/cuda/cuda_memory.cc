// Device memory of the emulated CUDA runtime.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
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
std::map<void*, int> exported;     // descriptors, indexed by allocation
std::map<void*, size_t> imported;  // bytes, indexed by mapping

// The contents of a cudaIpcMemHandle_t.
struct Handle {
  pid_t pid;
  int fd;
  size_t bytes;
};

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
  if (const auto shared = exported.find(address); shared != exported.end()) {
    close(shared->second);
    exported.erase(shared);
  }
  madvise(memory, bytes, MADV_DONTNEED);  // the addresses are kept, not the pages
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

// Moves the allocation to memory with a descriptor.
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* address) {
  const std::lock_guard lock(mutex);
  const auto found = allocations.find(address);
  if (found == allocations.end()) return cudaErrorInvalidValue;
  const size_t bytes = found->second;
  if (!exported.contains(address)) {
    const int fd = memfd_create("cuda", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) return cudaErrorMemoryAllocation;
    const size_t filled = std::min(bytes, size_t{1} << 19);
    if (pwrite(fd, address, filled, 0) != static_cast<ssize_t>(filled)) {
      return cudaErrorMemoryAllocation;
    }
    void* const same = mmap(address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
    if (same != address) return cudaErrorMemoryAllocation;
    exported[address] = fd;
  }
  const Handle contents = {getpid(), exported[address], bytes};
  std::memcpy(handle->reserved, &contents, sizeof contents);
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** address, cudaIpcMemHandle_t handle, unsigned) {
  if (emulation::faults.fails_ipc) return cudaErrorInvalidValue;
  Handle contents;
  std::memcpy(&contents, handle.reserved, sizeof contents);
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", contents.pid, contents.fd);
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return cudaErrorInvalidValue;
  *address = mmap(nullptr, contents.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (*address == MAP_FAILED) return cudaErrorMemoryAllocation;
  const std::lock_guard lock(mutex);
  imported[*address] = contents.bytes;
  return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void* address) {
  const std::lock_guard lock(mutex);
  const auto found = imported.find(address);
  if (found == imported.end()) return cudaErrorInvalidValue;
  munmap(address, found->second);
  imported.erase(found);
  return cudaSuccess;
}
