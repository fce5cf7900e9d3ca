// Identifies a process of a mesh and one of its devices to the other processes.
#ifndef JAX_EP_RUNTIME_TRANSPORT_IDENTITY_H_
#define JAX_EP_RUNTIME_TRANSPORT_IDENTITY_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ffi/runtime/status.h"

namespace jax_ep {

// Sent as it is. Another version of jax_ep may read it: its size and the first three members never
// change.
struct Identity {
  static constexpr uint32_t kMagic = 0x6a657031;
  static constexpr size_t kSecretBytes = 16;

  uint32_t magic = kMagic;
  uint32_t size = sizeof(Identity);
  char version[48] = {};   // jax_ep's
  uint64_t process = 0;    // random, so unique; never 0
  int64_t pid = 0;         // in its own namespace
  int64_t index = 0;       // numbers the processes of a mesh
  int64_t logical_id = 0;  // the device's, in the mesh
  int64_t device = 0;      // CUDA ordinal in its process
  char boot_id[40] = {};   // the same in all processes of one kernel
  char host[64] = {};      // for messages
  char address[64] = {};   // names the process's socket
  char gpu[48] = {};       // the device's UUID; ranks may share one
  // "10.0.0.1:4711" or "[fd00::1]:4711", where processes of other hosts connect; empty if they need
  // not. A process that knows the secret belongs to the mesh.
  char network_address[64] = {};
  char secret[kSecretBytes] = {};
  char reserved[120] = {};
};
static_assert(sizeof(Identity) == 512);

// Describes this process, without a device and addresses.
Identity ThisProcess();

// "process 1 (pid 4711 on node7)". Processes of a mesh are numbered in the order of their first
// device.
std::string Describe(const Identity& identity);

// Whether these came from the same version of jax_ep. The message names both sides.
Status CheckVersions(const std::vector<Identity>& identities);

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_TRANSPORT_IDENTITY_H_
