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
  struct Mesh {
    std::vector<Identity> identities;
    bool has_network_addresses = false;
  };
  std::map<void*, Mesh> known;  // indexed by communicator
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

bool SpanHosts(const std::vector<Identity>& identities) {
  return std::any_of(identities.begin(), identities.end(), [&](const Identity& identity) {
    return std::strcmp(identity.boot_id, identities[0].boot_id) != 0;
  });
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
                         size_t num_devices, bool has_domains, std::vector<Identity>* identities) {
  auto& [mutex, known] = MeshesOfProcess();
  const auto first = std::min_element(local.begin(), local.end(), [](const auto& a, const auto& b) {
    return a.logical_id < b.logical_id;
  });
  const std::lock_guard lock(mutex);
  Identity self = ThisProcess();
  std::string address;
  if (Status status = Connections::OfProcess().Address(&address); !status.ok()) return status;
  std::strncpy(self.address, address.c_str(), sizeof self.address - 1);
  Stopwatch stopwatch;
  const auto gather = [&](Meshes::Mesh* mesh) {
    Status status = exchange.AllGather(local, self, num_devices, &mesh->identities);
    if (status.ok()) status = CheckVersions(mesh->identities);
    if (status.ok()) SetIndices(&mesh->identities);
    return status;
  };
  Meshes::Mesh mesh;
  const auto found = known.find(first->communicator);
  const bool is_known = found != known.end();
  if (is_known) {
    mesh = found->second;
  } else if (Status status = gather(&mesh); !status.ok()) {
    return status;
  }
  // All processes see the same identities, so all of them decide alike.
  const bool needs_network =
      has_domains && !mesh.has_network_addresses && SpanHosts(mesh.identities);
  if (needs_network) {
    // Without an address, the group that needs one reports the error.
    static_cast<void>(Connections::OfProcess().ListenOnNetwork(&self));
    mesh.has_network_addresses = true;
    if (Status status = gather(&mesh); !status.ok()) return status;
  }
  *identities = mesh.identities;
  if (is_known && !needs_network) return {};
  Debug("a mesh of ", num_devices, " devices: identities exchanged in ", stopwatch.Lap());
  for (const Identity& identity : *identities) {
    Debug("  logical id ", identity.logical_id, ": ", Describe(identity), ", device ",
          identity.device, ", ", identity.gpu, ", boot id ", identity.boot_id,
          needs_network ? ", listens at " : "", identity.network_address);
  }
  known[first->communicator] = std::move(mesh);
  return {};
}

void ForgetMeshes() {
  auto& [mutex, known] = MeshesOfProcess();
  const std::lock_guard lock(mutex);
  known.clear();
}

}  // namespace jax_ep
