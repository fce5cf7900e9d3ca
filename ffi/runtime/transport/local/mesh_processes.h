// The processes of a mesh.
#ifndef JAX_EP_RUNTIME_TRANSPORT_LOCAL_MESH_PROCESSES_H_
#define JAX_EP_RUNTIME_TRANSPORT_LOCAL_MESH_PROCESSES_H_

#include <cstddef>
#include <vector>

#include "ffi/runtime/status.h"
#include "ffi/runtime/transport/identity.h"
#include "ffi/runtime/transport/transport.h"

namespace jax_ep {

// Finds the identity of every device of a mesh that spans processes, in the order of logical ids.
// Processes exchange them once per communicator: XLA has one for each order of the devices, and all
// processes make their first call with it together. If `has_domains`, groups may span hosts: where
// the mesh does, the processes then begin to listen on the network, and exchange once more.
Status FindMeshProcesses(Exchange& exchange, std::vector<Exchange::Endpoint> local,
                         size_t num_devices, bool has_domains, std::vector<Identity>* identities);

// Forgets the processes of all meshes. A later communicator may have the address of one that has
// ended.
void ForgetMeshes();

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_TRANSPORT_LOCAL_MESH_PROCESSES_H_
