// UCX's functions. Nothing links UCX: a process that needs it opens it.
#ifndef JAX_EP_RUNTIME_NETWORK_UCX_LIBRARY_H_
#define JAX_EP_RUNTIME_NETWORK_UCX_LIBRARY_H_

#include <ucp/api/ucp.h>

#include <string>

#include "ffi/runtime/status.h"

#define JAX_EP_UCX_FUNCTIONS(F)     \
  F(ucp_am_send_nbx)                \
  F(ucp_cleanup)                    \
  F(ucp_config_modify)              \
  F(ucp_config_read)                \
  F(ucp_config_release)             \
  F(ucp_ep_close_nbx)               \
  F(ucp_ep_create)                  \
  F(ucp_ep_flush_nbx)               \
  F(ucp_ep_query)                   \
  F(ucp_ep_rkey_unpack)             \
  F(ucp_get_version)                \
  F(ucp_init_version)               \
  F(ucp_mem_map)                    \
  F(ucp_mem_query)                  \
  F(ucp_mem_unmap)                  \
  F(ucp_put_nbx)                    \
  F(ucp_request_check_status)       \
  F(ucp_request_free)               \
  F(ucp_rkey_buffer_release)        \
  F(ucp_rkey_destroy)               \
  F(ucp_rkey_pack)                  \
  F(ucp_worker_create)              \
  F(ucp_worker_destroy)             \
  F(ucp_worker_get_address)         \
  F(ucp_worker_progress)            \
  F(ucp_worker_release_address)     \
  F(ucp_worker_set_am_recv_handler) \
  F(ucs_status_string)

namespace jax_ep {

struct UcxLibrary {
  std::string path;
  std::string version;  // "1.22.0"
  unsigned major = 0;
  unsigned minor = 0;
#define JAX_EP_DECLARE(name) decltype(&::name) name = nullptr;
  JAX_EP_UCX_FUNCTIONS(JAX_EP_DECLARE)
#undef JAX_EP_DECLARE
};

// Opens libucp.so.0 of a folder, or without one the system's. A process has one UCX: one that
// another library has opened before is taken. An error says what to install.
Status OpenUcx(const std::string& folder, const UcxLibrary** library);

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_NETWORK_UCX_LIBRARY_H_
