// Declares what groups that span processes need of the platform: an all-gather to meet, and memory
// that other processes of the host can map. Tests have others than CUDA's.
#ifndef JAX_EP_RUNTIME_TRANSPORT_TRANSPORT_H_
#define JAX_EP_RUNTIME_TRANSPORT_TRANSPORT_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ffi/runtime/status.h"
#include "ffi/runtime/transport/identity.h"
#include "ffi/runtime/transport/unique_fd.h"

namespace jax_ep {

// Thread-safe.
class Exchange {
 public:
  // A device of this process in the mesh.
  struct Endpoint {
    int device = 0;  // CUDA ordinal
    int64_t logical_id = 0;
    void* communicator = nullptr;  // the mesh's, lent by XLA
    std::string gpu = {};          // UUID

    Identity IdentityIn(const Identity& process) const;
  };

  virtual ~Exchange() = default;

  // Gathers the identity of every device of a mesh, in the order of logical ids. One thread of each
  // process calls it for all of its devices.
  virtual Status AllGather(const std::vector<Endpoint>& local, const Identity& self,
                           size_t num_devices, std::vector<Identity>* identities) = 0;
};

// Memory of this process for another one to map. Opaque to all but the transport that makes it,
// sends it and opens it.
struct MemoryHandle {
  UniqueFd descriptor = {};  // local processes pass it over a socket
};

// Thread-safe.
class PeerMemory {
 public:
  struct Mapping {
    void* address = nullptr;
    size_t bytes = 0;
    uint64_t handle = 0;
  };

  virtual ~PeerMemory() = default;

  virtual const char* name() const = 0;

  // Allocates memory of devices[0] for all of `devices`. If it has not enough, sets
  // `out_of_memory`.
  virtual Status Allocate(const std::vector<int>& devices, size_t bytes, Mapping* mapping,
                          bool* out_of_memory) = 0;
  // Makes a handle that other processes import.
  virtual Status Export(const Mapping& mapping, MemoryHandle* handle) = 0;
  // Maps another process's memory, as long as it was allocated, for all of `devices`.
  virtual Status Import(const std::vector<int>& devices, const MemoryHandle& handle, size_t bytes,
                        Mapping* mapping) = 0;
  // Ends this process's use. Memory lives until all processes have ended theirs.
  virtual void Unmap(Mapping* mapping) = 0;
  // Frees what all processes have unmapped, if that has been left. The devices are idle.
  virtual void FreeUnused() {}
};

struct Transport {
  Exchange* exchange = nullptr;
  // In the order in which they are tried. The processes of a group agree on the first that works.
  std::vector<PeerMemory*> memories;
};

// NCCL's all-gather, and memory of the CUDA driver or CUDA IPC. Only in builds with CUDA.
const Transport* CudaTransport();

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_TRANSPORT_TRANSPORT_H_
