// Memory of cudaMalloc with CUDA's interprocess handles, for where the driver's descriptors cannot
// be imported: CUDA opens these also if the GPU is not visible to a process.
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "ffi/runtime/cuda/device_cuda.h"
#include "ffi/runtime/transport/local/cuda_transport.h"

namespace jax_ep {
namespace {

// CUDA puts small allocations into blocks of 2 MiB. It exports whole blocks, and opens each once.
constexpr size_t kBlock = size_t{2} << 20;

// CUDA forbids to free memory that another process has open. So the handle is sent as a file, with
// a lock that ends when every process has closed the file, or has died.
struct File {
  UniqueFd shared;  // has the lock; all copies of it are the same open file
  UniqueFd own;     // another open file, which gets the lock last

  Status Write(const cudaIpcMemHandle_t& handle) {
    shared = UniqueFd(memfd_create("jax_ep", MFD_CLOEXEC));
    const std::string path = Concatenate("/proc/self/fd/", shared.get());
    own = UniqueFd(open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (!own.is_open() || flock(shared.get(), LOCK_SH) != 0 ||
        pwrite(shared.get(), &handle, sizeof handle, 0) != sizeof handle) {
      return FailedPrecondition("making a file for a handle: too many files are open");
    }
    return {};
  }

  bool IsClosedByAll() const { return flock(own.get(), LOCK_EX | LOCK_NB) == 0; }
};

class IpcMemory : public PeerMemory {
 public:
  const char* name() const override { return "CUDA IPC"; }

  Status Allocate(const std::vector<int>& devices, size_t bytes, Mapping* mapping,
                  bool* out_of_memory) override {
    if (Status status = CheckOneDevice(devices); !status.ok()) return status;
    FreeUnused();
    cudaError_t error = cudaMalloc(&mapping->address, (bytes + kBlock - 1) / kBlock * kBlock);
    *out_of_memory = error == cudaErrorMemoryAllocation;
    if (error != cudaSuccess) {
      mapping->address = nullptr;
      return FromCuda(error, "allocating a workspace");
    }
    mapping->bytes = bytes;
    const std::lock_guard lock(mutex_);
    Owned& owned = owned_[mapping->address];
    owned.device = devices[0];
    cudaIpcMemHandle_t handle;
    error = cudaIpcGetMemHandle(&handle, mapping->address);
    if (error != cudaSuccess) {
      return FromCuda(error, "exporting a workspace (cudaIpcGetMemHandle)");
    }
    return owned.file.Write(handle);
  }

  Status Export(const Mapping& mapping, MemoryHandle* exported) override {
    const std::lock_guard lock(mutex_);
    exported->descriptor = Copy(owned_.at(mapping.address).file.shared.get());
    if (!exported->descriptor.is_open())
      return FailedPrecondition("exporting: too many files are open");
    return {};
  }

  Status Import(const std::vector<int>& devices, const MemoryHandle& exported, size_t bytes,
                Mapping* mapping) override {
    if (Status status = CheckOneDevice(devices); !status.ok()) return status;
    Opened opened = {devices[0], Copy(exported.descriptor.get())};
    cudaIpcMemHandle_t handle;
    if (pread(opened.shared.get(), &handle, sizeof handle, 0) != sizeof handle) {
      return FailedPrecondition("importing its workspace: it has sent no handle of CUDA IPC");
    }
    const cudaError_t error =
        cudaIpcOpenMemHandle(&mapping->address, handle, cudaIpcMemLazyEnablePeerAccess);
    if (error != cudaSuccess) {
      mapping->address = nullptr;
      return FromCuda(error, "importing its workspace (cudaIpcOpenMemHandle)");
    }
    mapping->bytes = bytes;
    const std::lock_guard lock(mutex_);
    opened_[mapping->address] = std::move(opened);
    return {};
  }

  void Unmap(Mapping* mapping) override {
    {
      const std::lock_guard lock(mutex_);
      if (const auto found = owned_.find(mapping->address); found != owned_.end()) {
        found->second.file.shared = {};
        unused_.push_back({mapping->address, std::move(found->second)});
        owned_.erase(found);
      } else if (const auto other = opened_.find(mapping->address); other != opened_.end()) {
        const CurrentDevice current(other->second.device);
        static_cast<void>(cudaIpcCloseMemHandle(mapping->address));
        opened_.erase(other);
      }
    }
    *mapping = {};
    FreeUnused();
  }

  void FreeUnused() override {
    const std::lock_guard lock(mutex_);
    std::erase_if(unused_, [](const auto& unused) {
      const auto& [address, owned] = unused;
      if (owned.file.own.is_open() && !owned.file.IsClosedByAll()) return false;
      const CurrentDevice current(owned.device);
      static_cast<void>(cudaFree(address));
      return true;
    });
  }

 private:
  struct Owned {
    int device = 0;
    File file;
  };
  struct Opened {
    int device = 0;
    UniqueFd shared;
  };

  static UniqueFd Copy(int descriptor) { return UniqueFd(fcntl(descriptor, F_DUPFD_CLOEXEC, 0)); }

  // CUDA opens a handle for one device.
  static Status CheckOneDevice(const std::vector<int>& devices) {
    if (devices.size() == 1) return {};
    return FailedPrecondition("CUDA IPC serves one GPU per process, and this process drives ",
                              devices.size(), " of the group");
  }

  std::mutex mutex_;
  std::map<void*, Owned> owned_;
  std::map<void*, Opened> opened_;
  std::vector<std::pair<void*, Owned>> unused_;  // another process may have them open
};

}  // namespace

PeerMemory* CudaIpcMemory() {
  static auto* const memory = new IpcMemory;
  return memory;
}

}  // namespace jax_ep
