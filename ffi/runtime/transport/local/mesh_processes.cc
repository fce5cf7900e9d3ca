#include "ffi/runtime/transport/local/mesh_processes.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "ffi/runtime/debug.h"
#include "ffi/runtime/transport/local/connections.h"

namespace jax_ep {
namespace {

struct Meshes {
  std::mutex mutex;
  std::map<void*, std::vector<Identity>> known;  // indexed by communicator
};

Meshes& MeshesOfProcess() {
  static auto& meshes = *new Meshes;
  return meshes;
}

// Numbers the processes in the order of their first device.
void SetIndices(std::vector<Identity>* identities) {
  std::map<uint64_t, int64_t> indices;
  for (Identity& identity : *identities) {
    identity.index =
        indices.try_emplace(identity.process, static_cast<int64_t>(indices.size())).first->second;
  }
}

}  // namespace

Identity Exchange::Endpoint::IdentityIn(const Identity& process) const {
  Identity identity = process;
  identity.logical_id = logical_id;
  identity.device = device;
  std::strncpy(identity.gpu, gpu.c_str(), sizeof identity.gpu - 1);
  return identity;
}

Status FindMeshProcesses(Exchange& exchange, std::vector<Exchange::Endpoint> local,
                         size_t num_devices, std::vector<Identity>* identities) {
  auto& [mutex, known] = MeshesOfProcess();
  const auto first = std::min_element(local.begin(), local.end(), [](const auto& a, const auto& b) {
    return a.logical_id < b.logical_id;
  });
  const std::lock_guard lock(mutex);
  const auto found = known.find(first->communicator);
  if (found != known.end()) {
    *identities = found->second;
    return {};
  }
  Identity self = ThisProcess();
  std::string address;
  if (Status status = Connections::OfProcess().Address(&address); !status.ok()) return status;
  std::strncpy(self.address, address.c_str(), sizeof self.address - 1);
  Stopwatch stopwatch;
  Status status = exchange.AllGather(local, self, num_devices, identities);
  if (status.ok()) status = CheckVersions(*identities);
  if (!status.ok()) return status;
  SetIndices(identities);
  Debug("a mesh of ", num_devices, " devices: identities exchanged in ", stopwatch.Lap());
  for (const Identity& identity : *identities) {
    Debug("  logical id ", identity.logical_id, ": ", Describe(identity), ", device ",
          identity.device, ", ", identity.gpu, ", boot id ", identity.boot_id);
  }
  known[first->communicator] = *identities;
  return {};
}

void ForgetMeshes() {
  auto& [mutex, known] = MeshesOfProcess();
  const std::lock_guard lock(mutex);
  known.clear();
}

}  // namespace jax_ep
