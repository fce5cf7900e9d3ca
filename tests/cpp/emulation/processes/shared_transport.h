// A transport between processes that one test has forked: memory that several processes map, and an
// exchange by memory that they share from the beginning.
#ifndef JAX_EP_TESTS_CPP_EMULATION_PROCESSES_SHARED_TRANSPORT_H_
#define JAX_EP_TESTS_CPP_EMULATION_PROCESSES_SHARED_TRANSPORT_H_

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <new>
#include <thread>

#include "ffi/runtime/transport/transport.h"

namespace jax_ep::testing {

// Makes memory that later forks share. It is zeros.
template <typename T>
T* SharedBetweenForks() {
  void* const memory =
      mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return new (memory) T;
}

// Gathers identities by memory. A communicator is a small number, cast to an address.
class SharedExchange : public Exchange {
 public:
  static constexpr size_t kMeshes = 8, kRanks = 16;

  static void* Communicator(uintptr_t mesh) { return reinterpret_cast<void*>(mesh + 1); }

  Status AllGather(const std::vector<Endpoint>& local, const Identity& self, size_t num_devices,
                   std::vector<Identity>* identities) override {
    const uintptr_t number = reinterpret_cast<uintptr_t>(local[0].communicator) - 1;
    const size_t round = num_rounds_[number]++;
    Mesh& mesh = shared_->meshes[number];
    Identity* const all = mesh.identities[round % 2];  // the others may still read those before
    for (const Endpoint& endpoint : local) {
      Identity& identity = all[endpoint.logical_id];
      identity = endpoint.IdentityIn(self);
      if (change) change(&identity);
      ++mesh.arrived;
    }
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (mesh.arrived < (round + 1) * num_devices) {
      if (std::chrono::steady_clock::now() > deadline) return FailedPrecondition("nobody comes");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    identities->assign(all, all + num_devices);
    return {};
  }

  // Whether all devices of the first mesh have arrived.
  bool HasMet(size_t num_devices) const { return shared_->meshes[0].arrived >= num_devices; }

  // Changes the identity of this process: to a host, for example.
  std::function<void(Identity* identity)> change;

 private:
  struct Mesh {
    std::atomic<size_t> arrived = 0;
    Identity identities[2][kRanks];
  };
  struct Shared {
    Mesh meshes[kMeshes];
  };
  Shared* const shared_ = SharedBetweenForks<Shared>();
  size_t num_rounds_[kMeshes] = {};
};

// Memory with descriptors. Each process maps it at an address of its own.
class SharedMemory : public PeerMemory {
 public:
  const char* name() const override { return "memfd"; }

  Status Allocate(const std::vector<int>& devices, size_t bytes, Mapping* mapping,
                  bool* out_of_memory) override {
    *out_of_memory = fails_device == devices[0] && bytes > free_bytes;
    if (*out_of_memory) return FailedPrecondition("no memory");
    const int fd = memfd_create("jax_ep", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
      return FailedPrecondition("no memfd");
    }
    Status status = Map(fd, bytes, mapping);
    // Not zeros: device memory is uninitialized. The rest of a large allocation is left to the
    // system.
    if (status.ok()) std::memset(mapping->address, 0xa5, std::min(bytes, size_t{1} << 19));
    return status;
  }

  Status Export(const Mapping& mapping, MemoryHandle* handle) override {
    handle->descriptor = UniqueFd(fcntl(static_cast<int>(mapping.handle) - 1, F_DUPFD_CLOEXEC, 0));
    return {};
  }

  Status Import(const std::vector<int>&, const MemoryHandle& handle, size_t bytes,
                Mapping* mapping) override {
    if (before_import) before_import();
    if (fails_import) return FailedPrecondition("importing its workspace: no luck");
    return Map(fcntl(handle.descriptor.get(), F_DUPFD_CLOEXEC, 0), bytes, mapping);
  }

  void Unmap(Mapping* mapping) override {
    if (mapping->address != nullptr) munmap(mapping->address, mapping->bytes);
    if (mapping->handle != 0) close(static_cast<int>(mapping->handle) - 1);
    *mapping = {};
  }

  // Faults, set while no other thread allocates.
  int fails_device = -1;
  size_t free_bytes = 0;
  bool fails_import = false;
  std::function<void()> before_import;

 private:
  // Keeps the descriptor as the handle, plus 1: 0 is none.
  static Status Map(int fd, size_t bytes, Mapping* mapping) {
    void* const address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (address == MAP_FAILED) {
      close(fd);
      return FailedPrecondition("no mapping");
    }
    *mapping = {address, bytes, static_cast<uint64_t>(fd) + 1};
    return {};
  }
};

}  // namespace jax_ep::testing

#endif  // JAX_EP_TESTS_CPP_EMULATION_PROCESSES_SHARED_TRANSPORT_H_
