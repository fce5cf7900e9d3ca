#include "ffi/runtime/network/ucx/worker.h"

#include <cstdlib>
#include <random>

#include "ffi/runtime/network/ucx/packed.h"

namespace jax_ep {
namespace {

// The API of the oldest version that library.cc takes.
constexpr unsigned kApiMajor = 1, kApiMinor = 17;

// Where the environment sets no value. Versions of UCX without one of them do without.
constexpr std::pair<const char*, const char*> kDefaults[] = {
    {"POSIX_ERROR_HANDLING", "y"},       // tells of the death of a process over shared memory
    {"KEEPALIVE_INTERVAL", "1s"},        // likewise, while nothing is sent
    {"TCP_TX_SEG_SIZE", "64k"},          // as long as those received; GPU memory is copied by them
    {"IB_PCI_RELAXED_ORDERING", "off"},  // bytes are there before the flag that follows them
};

bool IsSet(const char* name) {
  const char* const value = std::getenv(Concatenate("UCX_", name).c_str());
  return value != nullptr && *value != '\0';
}

uint64_t Random() {
  std::random_device source;
  return uint64_t{source()} << 32 | source();
}

}  // namespace

UcxWorker::UcxWorker(const UcxLibrary& library) : ucx_(library), id_(Random()) {}

UcxWorker::~UcxWorker() {
  if (worker_ != nullptr) ucx_.ucp_worker_destroy(worker_);
  for (const auto& [address, mapping] : mappings_) ucx_.ucp_mem_unmap(context_, mapping.handle);
  if (context_ != nullptr) ucx_.ucp_cleanup(context_);
}

Status UcxWorker::Failed(const char* step, ucs_status_t status) const {
  return FailedPrecondition("jax_ep: UCX ", ucx_.version, " fails in ", step, ": ",
                            ucx_.ucs_status_string(status),
                            ". UCX_LOG_LEVEL=info in the environment has UCX say more");
}

Status UcxWorker::Configure(ucp_config_t* config, const UcxSettings& settings) const {
  for (const auto& [name, value] : kDefaults) {
    if (!IsSet(name)) static_cast<void>(ucx_.ucp_config_modify(config, name, value));
  }
  for (const auto& [name, value] : settings) {
    if (ucx_.ucp_config_modify(config, name.c_str(), value.c_str()) != UCS_OK) {
      return InvalidArgument("jax_ep: UCX ", ucx_.version, " refuses the setting ", name, "=",
                             value,
                             "; expected a name of ucx_info -c without UCX_, and a value of it");
    }
  }
  return {};
}

Status UcxWorker::Start(const UcxSettings& settings) {
  ucp_config_t* config = nullptr;
  if (const ucs_status_t error = ucx_.ucp_config_read(nullptr, nullptr, &config)) {
    return Failed("reading its settings", error);
  }
  Status status = Configure(config, settings);
  if (status.ok()) {
    ucp_params_t parameters = {};
    parameters.field_mask = UCP_PARAM_FIELD_FEATURES;
    parameters.features = UCP_FEATURE_RMA | UCP_FEATURE_AM;
    const ucs_status_t error =
        ucx_.ucp_init_version(kApiMajor, kApiMinor, &parameters, config, &context_);
    if (error != UCS_OK) {
      context_ = nullptr;
      status = Failed("looking for networks (UCX_TLS and UCX_NET_DEVICES choose)", error);
    }
  }
  ucx_.ucp_config_release(config);
  if (!status.ok()) return status;
  ucp_worker_params_t parameters = {};
  parameters.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  parameters.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  if (const ucs_status_t error = ucx_.ucp_worker_create(context_, &parameters, &worker_)) {
    worker_ = nullptr;
    return Failed("starting on its networks", error);
  }
  return {};
}

Status UcxWorker::Address(std::string* address) const {
  ucp_address_t* bytes = nullptr;
  size_t size = 0;
  if (const ucs_status_t error = ucx_.ucp_worker_get_address(worker_, &bytes, &size)) {
    return Failed("telling its address", error);
  }
  const std::string content(reinterpret_cast<const char*>(bytes), size);
  ucx_.ucp_worker_release_address(worker_, bytes);
  *address = Pack(ucx_, {.kind = UcxPacked::Kind::kAddress, .begin = id_, .content = content});
  return {};
}

Status UcxWorker::Map(void* address, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  if (address == nullptr || bytes == 0 || mappings_.contains(begin)) {
    return InvalidArgument("jax_ep: memory of ", bytes, " bytes at ", address,
                           " is to be registered; expected memory that is not registered yet");
  }
  ucp_mem_map_params_t parameters = {};
  parameters.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
  parameters.address = address;
  parameters.length = bytes;
  ucp_mem_h handle = nullptr;
  if (const ucs_status_t error = ucx_.ucp_mem_map(context_, &parameters, &handle)) {
    return Failed(Concatenate("registering ", bytes, " bytes at ", address).c_str(), error);
  }
  ucp_mem_attr_t attributes = {};
  attributes.field_mask = UCP_MEM_ATTR_FIELD_MEM_TYPE;
  if (const ucs_status_t error = ucx_.ucp_mem_query(handle, &attributes)) {
    ucx_.ucp_mem_unmap(context_, handle);
    return Failed("asking what kind of memory is registered", error);
  }
  mappings_[begin] = {bytes, handle, attributes.mem_type == UCS_MEMORY_TYPE_HOST};
  return {};
}

Status UcxWorker::Unmap(void* address) {
  const auto found = mappings_.find(reinterpret_cast<uintptr_t>(address));
  if (found == mappings_.end()) {
    return InvalidArgument("jax_ep: no memory at ", address, " is registered");
  }
  const ucs_status_t error = ucx_.ucp_mem_unmap(context_, found->second.handle);
  mappings_.erase(found);
  return error == UCS_OK ? Status{} : Failed("unregistering memory", error);
}

Status UcxWorker::PackKey(void* address, std::string* key) const {
  const auto& [begin, mapping] = *mappings_.find(reinterpret_cast<uintptr_t>(address));
  void* bytes = nullptr;
  size_t size = 0;
  if (const ucs_status_t error = ucx_.ucp_rkey_pack(context_, mapping.handle, &bytes, &size)) {
    return Failed("packing the key of memory", error);
  }
  const std::string content(static_cast<const char*>(bytes), size);
  ucx_.ucp_rkey_buffer_release(bytes);
  *key = Pack(
      ucx_,
      {.kind = UcxPacked::Kind::kKey, .begin = begin, .size = mapping.bytes, .content = content});
  return {};
}

const UcxWorker::Mapping* UcxWorker::Find(const void* address, size_t bytes) const {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  auto found = mappings_.upper_bound(begin);
  if (found == mappings_.begin()) return nullptr;
  --found;
  const size_t offset = begin - found->first;
  const size_t size = found->second.bytes;
  return offset <= size && bytes <= size - offset ? &found->second : nullptr;
}

}  // namespace jax_ep
