#include "ffi/runtime/network/nvshmem/world.h"

#include <cstring>
#include <vector>

#include "ffi/runtime/debug.h"
#include "ffi/runtime/settings.h"

namespace jax_ep {
namespace {

// A process's part of a step, followed by the message of an error.
struct Part {
  uint64_t world = 0;  // 0: it has none yet
  uint64_t heap_bytes = 0;
  uint32_t num_devices = 0;
  uint32_t is_ok = 0;
  NvshmemUniqueId id;  // the first process makes it
};

std::string Encode(Part part, const Status& status) {
  part.is_ok = status.ok();
  return std::string(reinterpret_cast<const char*>(&part), sizeof part) + status.message;
}

// Gathers the parts of all. Returns the first error of any.
Status Agree(const NetworkMembers& members, const Part& own, const Status& status,
             std::vector<Part>* parts) {
  std::vector<std::string> all;
  if (Status gathered = members.gather(Encode(own, status), &all); !gathered.ok()) return gathered;
  parts->assign(all.size(), {});
  for (size_t process = 0; process < all.size(); ++process) {
    const std::string& bytes = all[process];
    Part& part = (*parts)[process];
    if (bytes.size() < sizeof part) {
      return FailedPrecondition("jax_ep: ", members.describe(process), " has sent no part");
    }
    std::memcpy(&part, bytes.data(), sizeof part);
    if (part.is_ok == 0) {
      return FailedPrecondition("jax_ep: ", members.describe(process),
                                " cannot use NVSHMEM: ", bytes.substr(sizeof part));
    }
  }
  return {};
}

// Ids of worlds differ, because NVSHMEM's unique ids do. FNV-1a.
uint64_t Hash(const NvshmemUniqueId& id) {
  uint64_t hash = 0xcbf29ce484222325;
  for (char byte : id.content) hash = (hash ^ static_cast<uint8_t>(byte)) * 0x100000001b3;
  return hash | 1;
}

Status Failed(const NvshmemLibrary& library, const char* step, int code) {
  return FailedPrecondition("NVSHMEM ", library.version, " (", library.path, ") fails in ", step,
                            " with status ", code,
                            "; NVSHMEM_DEBUG=INFO in the environment has it say more");
}

// All processes have decided alike so far.
Status Compare(const NetworkMembers& members, const std::vector<Part>& parts) {
  for (size_t process = 0; process < parts.size(); ++process) {
    const Part& part = parts[process];
    if (part.num_devices != 1) {
      return FailedPrecondition("jax_ep: ", members.describe(process), " drives ", part.num_devices,
                                " GPUs, and NVSHMEM needs a process for each GPU; start as many "
                                "processes, or set JAX_EP_NETWORK=ucx");
    }
    if (part.heap_bytes != parts[0].heap_bytes) {
      return FailedPrecondition("jax_ep: JAX_EP_NVSHMEM_HEAP_MB differs between ",
                                members.describe(0), " and ", members.describe(process));
    }
    if (part.world != parts[0].world) {
      return FailedPrecondition(
          "jax_ep: ", members.describe(0), " and ", members.describe(process),
          " are not in one NVSHMEM world, which is the processes of the first mesh whose experts "
          "span NVLink domains; use that mesh, or a part of it");
    }
  }
  return {};
}

}  // namespace

Status NvshmemWorld::Prepare(const NetworkMembers& members, const Status& own,
                             NvshmemUniqueId* id) {
  if (!own.ok()) return own;
  if (id_ != 0 || !failure_.ok()) return failure_;
  Status status = ReadNvshmemHeapBytes(&heap_bytes_);
  if (status.ok()) status = OpenNvshmem(options_.folder, &library_);
  for (int device : members.devices) {
    if (status.ok()) status = options_.check(device);
  }
  if (!status.ok() || members.self != 0) return status;
  const int code = library_->nvshmemx_get_uniqueid(id);
  return code == 0 ? Status{} : Failed(*library_, "nvshmemx_get_uniqueid", code);
}

// All processes are here: what follows waits for them.
Status NvshmemWorld::Start(const NetworkMembers& members, const NvshmemUniqueId& id) {
  const NvshmemLibrary& library = *library_;
  const int self = static_cast<int>(members.self), count = static_cast<int>(members.count);
  Stopwatch stopwatch;
  NvshmemAttributes attributes;
  if (const int code = library.nvshmemx_set_attr_uniqueid_args(self, count, &id, &attributes)) {
    return Failed(library, "nvshmemx_set_attr_uniqueid_args", code);
  }
  if (const int code = library.nvshmemx_hostlib_init_attr(kNvshmemInitWithUniqueId, &attributes)) {
    return Failed(library, "nvshmemx_hostlib_init_attr", code);
  }
  if (const int state = library.nvshmemx_init_status(); state < kNvshmemIsInitialized) {
    return Failed(library, "initialization", state);
  }
  const std::string init_time = stopwatch.Lap();
  void* const heap = library.nvshmem_malloc(heap_bytes_);
  if (heap == nullptr) {
    return FailedPrecondition("NVSHMEM ", library.version, " cannot allocate its heap of ",
                              heap_bytes_,
                              " bytes outside JAX's pool (JAX_EP_NVSHMEM_HEAP_MB). Let JAX reserve "
                              "less (XLA_PYTHON_CLIENT_MEM_FRACTION, 0.75 by default)");
  }
  heap_ = NvshmemHeap(reinterpret_cast<uint64_t>(heap), heap_bytes_);
  const std::string heap_time = stopwatch.Lap();
  if (Status status = options_.load_kernels(library); !status.ok()) return status;
  pe_ = self;
  Debug("NVSHMEM ", library.version, " (", library.path, "): process ", self, " of ", count,
        ", initialized in ", init_time, ", a heap of ", heap_bytes_, " bytes in ", heap_time,
        ", kernels in ", stopwatch.Lap());
  return {};
}

Status NvshmemWorld::Join(const NetworkMembers& members, const Status& own) {
  const std::lock_guard lock(mutex_);
  Part part;
  const Status prepared = Prepare(members, own, &part.id);
  part.world = id_;
  part.heap_bytes = heap_bytes_;
  part.num_devices = static_cast<uint32_t>(members.devices.size());
  std::vector<Part> parts;
  Status status = Agree(members, part, prepared, &parts);
  if (status.ok()) status = Compare(members, parts);
  if (!status.ok() || id_ != 0) return status;
  status = options_.on_device(members.devices[0], [&] { return Start(members, parts[0].id); });
  const uint64_t id = Hash(parts[0].id);
  failure_ = Agree(members, part, status, &parts);
  if (failure_.ok()) id_ = id;
  return failure_;
}

}  // namespace jax_ep
