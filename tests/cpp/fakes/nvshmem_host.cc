// NVSHMEM's library on the host as jax_ep uses it, for tests: its processes share a file as their
// heaps. The environment changes it:
//
//   FAKE_NVSHMEM_VERSION   "3.4.5"
//   FAKE_NVSHMEM_FAILS     a function that fails
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "ffi/runtime/network/nvshmem/library.h"

#ifndef FAKE_NVSHMEM_IS_PARTIAL
namespace {

constexpr size_t kHeaderBytes = 4096;

// Begins the file.
struct Header {
  std::atomic<int> arrived;
};

char path[sizeof jax_ep::NvshmemUniqueId::content];
int rank = -1, size = 0;
bool is_initialized = false;
size_t heap_bytes = 0;
Header* header = nullptr;
unsigned char* heaps = nullptr;

bool Fails(const char* function) {
  const char* const name = std::getenv("FAKE_NVSHMEM_FAILS");
  return name != nullptr && std::strcmp(name, function) == 0;
}

// All processes call it equally often.
void Barrier() {
  static int round = 0;
  ++header->arrived;
  for (++round; header->arrived < round * size;) usleep(100);
}

void* Map(size_t bytes, int64_t offset) {
  const int file = open(path, O_RDWR | O_CREAT, 0600);
  if (ftruncate(file, static_cast<int64_t>(kHeaderBytes + bytes)) != 0) std::abort();
  void* const mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, offset);
  close(file);
  return mapped == MAP_FAILED ? nullptr : mapped;
}

}  // namespace
#endif  // FAKE_NVSHMEM_IS_PARTIAL

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void nvshmemx_vendor_get_version_info(int* major, int* minor, int* patch) {
  const char* const version = std::getenv("FAKE_NVSHMEM_VERSION");
  std::sscanf(version != nullptr ? version : "3.4.5", "%d.%d.%d", major, minor, patch);
}

#ifndef FAKE_NVSHMEM_IS_PARTIAL
EXPORT int nvshmemx_get_uniqueid(jax_ep::NvshmemUniqueId* id) {
  static int count = 0;
  std::snprintf(id->content, sizeof id->content, "/tmp/fake_nvshmem_%d_%d", getpid(), count++);
  return Fails("nvshmemx_get_uniqueid") ? 7 : 0;
}

EXPORT int nvshmemx_set_attr_uniqueid_args(int of_rank, int of_size,
                                           const jax_ep::NvshmemUniqueId* id,
                                           jax_ep::NvshmemAttributes* attributes) {
  attributes->unique_id.id = id;
  attributes->unique_id.rank = of_rank;
  attributes->unique_id.size = of_size;
  return 0;
}

EXPORT int nvshmemx_hostlib_init_attr(unsigned flags, jax_ep::NvshmemAttributes* attributes) {
  if (flags != jax_ep::kNvshmemInitWithUniqueId || is_initialized) return 1;
  if (Fails("nvshmemx_hostlib_init_attr")) return 7;
  std::memcpy(path, attributes->unique_id.id->content, sizeof path);
  rank = attributes->unique_id.rank;
  size = attributes->unique_id.size;
  header = static_cast<Header*>(Map(kHeaderBytes, 0));
  Barrier();
  is_initialized = true;
  return 0;
}

EXPORT int nvshmemx_init_status() { return is_initialized ? 2 : 0; }

EXPORT void* nvshmem_malloc(size_t bytes) {
  if (!is_initialized || Fails("nvshmem_malloc")) return nullptr;
  heap_bytes = bytes;
  heaps = static_cast<unsigned char*>(
      Map(static_cast<size_t>(size) * bytes, static_cast<int64_t>(kHeaderBytes)));
  Barrier();
  unlink(path);
  return heaps + static_cast<size_t>(rank) * bytes;
}

EXPORT void* nvshmem_ptr(const void* address, int pe) {
  const auto* const own = heaps + static_cast<size_t>(rank) * heap_bytes;
  const auto offset = static_cast<size_t>(static_cast<const unsigned char*>(address) - own);
  if (offset >= heap_bytes || pe < 0 || pe >= size) return nullptr;
  return heaps + static_cast<size_t>(pe) * heap_bytes + offset;
}

EXPORT int nvshmemx_cumodule_init(void* /*module*/) { return is_initialized ? 0 : 7; }
#endif  // FAKE_NVSHMEM_IS_PARTIAL
