// NVSHMEM's functions on the host. Nothing links NVSHMEM: a process that needs it opens it. What is
// used of its ABI is declared here, so that builds without its headers have it, too.
#ifndef JAX_EP_RUNTIME_NETWORK_NVSHMEM_LIBRARY_H_
#define JAX_EP_RUNTIME_NETWORK_NVSHMEM_LIBRARY_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "ffi/runtime/status.h"

namespace jax_ep {

// nvshmemx_uniqueid_t: where the processes of a world meet.
struct NvshmemUniqueId {
  int32_t version = (1 << 16) + 128;
  char content[124] = {};
};
static_assert(sizeof(NvshmemUniqueId) == 128);

// nvshmemx_init_attr_t.
struct NvshmemAttributes {
  int32_t version = (1 << 16) + 144;
  void* communicator = nullptr;  // MPI's
  int32_t arguments_version = (1 << 16) + 128;
  struct {
    int32_t version = (1 << 16) + 24;
    const NvshmemUniqueId* id = nullptr;
    int32_t rank = -1;
    int32_t size = -1;
  } unique_id;
  char content[96] = {};
};
static_assert(sizeof(NvshmemAttributes) == 144 && offsetof(NvshmemAttributes, unique_id) == 24);

inline constexpr unsigned kNvshmemInitWithUniqueId = 1 << 3;
inline constexpr int kNvshmemIsInitialized = 2;  // a result of nvshmemx_init_status

#define JAX_EP_NVSHMEM_FUNCTIONS(F)                                                    \
  F(nvshmemx_vendor_get_version_info, void(int* major, int* minor, int* patch))        \
  F(nvshmemx_get_uniqueid, int(NvshmemUniqueId * id))                                  \
  F(nvshmemx_set_attr_uniqueid_args,                                                   \
    int(int rank, int size, const NvshmemUniqueId* id, NvshmemAttributes* attributes)) \
  F(nvshmemx_hostlib_init_attr, int(unsigned flags, NvshmemAttributes* attributes))    \
  F(nvshmemx_init_status, int())                                                       \
  F(nvshmemx_cumodule_init, int(void* module))                                         \
  F(nvshmem_malloc, void*(size_t bytes))                                               \
  F(nvshmem_ptr, void*(const void* address, int pe))

// The NVSHMEM whose device functions the kernels are linked with. The host's has the same major
// version and is not older.
inline constexpr int kNvshmemMajor = 3, kNvshmemOldestMinor = 4;

struct NvshmemLibrary {
  std::string path;
  std::string version;  // "3.4.5"
#define JAX_EP_DECLARE(name, ...)      \
  using name##_function = __VA_ARGS__; \
  name##_function* name = nullptr;
  JAX_EP_NVSHMEM_FUNCTIONS(JAX_EP_DECLARE)
#undef JAX_EP_DECLARE
};

// Opens libnvshmem_host.so.3 of a folder, or without one the system's. One that another library has
// opened before is taken, because a process has one NVSHMEM. An error says what to install.
Status OpenNvshmem(const std::string& folder, const NvshmemLibrary** library);

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_NETWORK_NVSHMEM_LIBRARY_H_
