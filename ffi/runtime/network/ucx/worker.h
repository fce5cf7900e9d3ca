// A context and a worker of UCX, and the memory that is registered with them.
#ifndef JAX_EP_RUNTIME_NETWORK_UCX_WORKER_H_
#define JAX_EP_RUNTIME_NETWORK_UCX_WORKER_H_

#include <cstdint>
#include <map>
#include <string>

#include "ffi/runtime/network/ucx/library.h"
#include "ffi/runtime/network/ucx/ucx.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

class UcxWorker {
 public:
  explicit UcxWorker(const UcxLibrary& library);
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;
  // Endpoints are closed, and keys destroyed, before it ends.
  ~UcxWorker();

  // These settings win over the environment's.
  Status Start(const UcxSettings& settings);

  Status Address(std::string* address) const;
  // Tells this worker from all others.
  uint64_t id() const { return id_; }

  Status Map(void* address, size_t bytes);
  Status Unmap(void* address);
  // Returns what partners need to reach mapped memory.
  Status PackKey(void* address, std::string* key) const;

  struct Mapping {
    size_t bytes;
    ucp_mem_h handle;
    bool is_host;
  };
  // Finds the mapped memory that has these bytes, or null.
  const Mapping* Find(const void* address, size_t bytes) const;

  ucp_worker_h get() const { return worker_; }

 private:
  Status Configure(ucp_config_t* config, const UcxSettings& settings) const;
  Status Failed(const char* step, ucs_status_t status) const;

  const UcxLibrary& ucx_;
  const uint64_t id_;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  std::map<uintptr_t, Mapping> mappings_;
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_NETWORK_UCX_WORKER_H_
