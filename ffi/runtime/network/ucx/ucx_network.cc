#include "ffi/runtime/network/ucx/ucx_network.h"

#include <algorithm>
#include <utility>

#include "ffi/runtime/network/ucx/packed.h"

namespace jax_ep {
namespace {

constexpr std::chrono::seconds kClosing{1};

}  // namespace

UcxNetwork::UcxNetwork(const UcxLibrary& library, const UcxOptions& options)
    : ucx_(library),
      deadline_(std::chrono::duration_cast<Clock::duration>(
          std::chrono::duration<double>(options.deadline_seconds))),
      device_memory_(options.device_memory),
      way_(options.way),
      worker_(library) {}

Status UcxNetwork::Begin(const UcxSettings& settings) {
  Status status = worker_.Start(settings);
  return status.ok() ? ListenToMessages() : status;
}

UcxNetwork::~UcxNetwork() {
  std::vector<ucs_status_ptr_t> closing;
  for (const auto& connection : connections_) {
    ucp_request_param_t parameters = {};
    parameters.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    parameters.flags = connection->tells_failures ? UCP_EP_CLOSE_FLAG_FORCE : 0;
    const ucs_status_ptr_t request = ucx_.ucp_ep_close_nbx(connection->endpoint, &parameters);
    if (UCS_PTR_IS_PTR(request)) closing.push_back(request);
  }
  // Partners may be dead: they are not waited for.
  const auto deadline = Clock::now() + kClosing;
  for (ucs_status_ptr_t request : closing) {
    while (ucx_.ucp_request_check_status(request) == UCS_INPROGRESS && Clock::now() < deadline) {
      ucx_.ucp_worker_progress(worker_.get());
    }
    ucx_.ucp_request_free(request);
  }
  for (size_t i = 0; i < memories_.size(); ++i) Close(static_cast<int>(i));
}

Status UcxNetwork::Register(void* address, size_t bytes, std::string* key) {
  if (Status status = worker_.Map(address, bytes); !status.ok()) return status;
  if (device_memory_ != nullptr && worker_.Find(address, bytes)->is_host) {
    static_cast<void>(worker_.Unmap(address));
    return FailedPrecondition(
        "jax_ep: UCX ", ucx_.version, " takes GPU memory at ", address,
        " for the host's; set UCX_MEMTYPE_CACHE=n before this process starts");
  }
  return worker_.PackKey(address, key);
}

Status UcxNetwork::CreateEndpoint(const std::string& address, Connection* connection) const {
  ucp_ep_params_t parameters = {};
  parameters.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                          UCP_EP_PARAM_FIELD_ERR_HANDLER;
  parameters.address = reinterpret_cast<const ucp_address_t*>(address.data());
  parameters.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  parameters.err_handler = {&UcxNetwork::OnFailure, connection};
  ucs_status_t status = ucx_.ucp_ep_create(worker_.get(), &parameters, &connection->endpoint);
  if (status == UCS_ERR_UNREACHABLE) {
    // Some transports cannot tell of a failure: then the deadline does.
    connection->tells_failures = false;
    parameters.err_mode = UCP_ERR_HANDLING_MODE_NONE;
    status = ucx_.ucp_ep_create(worker_.get(), &parameters, &connection->endpoint);
  }
  if (status == UCS_OK) return {};
  return FailedPrecondition("jax_ep: UCX ", ucx_.version, " cannot connect to partner ",
                            connection->index, ": ", ucx_.ucs_status_string(status),
                            "; expected a network that both have (UCX_TLS, UCX_NET_DEVICES)");
}

Status UcxNetwork::Connect(const std::string& address, int* connection) {
  UcxPacked message;
  Status status = Unpack(ucx_, address, UcxPacked::Kind::kAddress, &message);
  if (!status.ok()) return status;
  auto made = std::make_unique<Connection>();
  made->network = this;
  made->index = static_cast<int>(connections_.size());
  made->partner = message.begin;
  status = CreateEndpoint(message.content, made.get());
  if (!status.ok()) return status;
  made->transports = Transports(made->endpoint);
  ChooseWay(made.get());
  *connection = made->index;
  connections_.push_back(std::move(made));
  return {};
}

void UcxNetwork::ChooseWay(Connection* connection) const {
  const auto has = [&](const char* name) {
    return connection->transports.find(name) != std::string::npos;
  };
  UcxWay way = way_;
  if (way == UcxWay::kDefault) {
    way = has("rc_") || has("dc_") ? UcxWay::kPuts
          : has("cuda_ipc")        ? UcxWay::kPutsWithFlagsInMessages
                                   : UcxWay::kMessages;
  }
  connection->puts_flags = way == UcxWay::kPuts;
  connection->puts_bytes = way != UcxWay::kMessages;
}

// Lists, for example, "tcp/eth0, cuda_copy/cuda".
std::string UcxNetwork::Transports(ucp_ep_h endpoint) const {
  ucp_transport_entry_t entries[16] = {};
  ucp_ep_attr_t attributes = {};
  attributes.field_mask = UCP_EP_ATTR_FIELD_TRANSPORTS;
  attributes.transports.entries = entries;
  attributes.transports.num_entries = std::size(entries);
  attributes.transports.entry_size = sizeof entries[0];
  if (ucx_.ucp_ep_query(endpoint, &attributes) != UCS_OK) return "unknown transports";
  std::string names;
  for (unsigned i = 0; i < attributes.transports.num_entries; ++i) {
    names += Concatenate(names.empty() ? "" : ", ", entries[i].transport_name, "/",
                         entries[i].device_name);
  }
  return names;
}

std::string UcxNetwork::Describe(int connection) const {
  return Describe(*connections_.at(connection));
}

std::string UcxNetwork::Describe(const Connection& connection) const {
  return Concatenate("UCX ", ucx_.version, " (", connection.transports, ")");
}

Status UcxNetwork::Open(int connection, const std::string& key, int* memory) {
  if (connection < 0 || connection >= static_cast<int>(connections_.size())) {
    return InvalidArgument("jax_ep: there is no connection ", connection);
  }
  Connection* const owner = connections_[connection].get();
  if (!owner->failure.ok()) return owner->failure;
  UcxPacked message;
  if (Status status = Unpack(ucx_, key, UcxPacked::Kind::kKey, &message); !status.ok()) {
    return status;
  }
  Memory opened = {
      .connection = owner, .key = nullptr, .begin = message.begin, .size = message.size};
  const ucs_status_t error =
      ucx_.ucp_ep_rkey_unpack(owner->endpoint, message.content.data(), &opened.key);
  if (error != UCS_OK) {
    return FailedPrecondition("jax_ep: ", Describe(connection), " cannot reach memory of partner ",
                              connection, ": ", ucx_.ucs_status_string(error));
  }
  const auto closed = std::find_if(memories_.begin(), memories_.end(),
                                   [](const Memory& other) { return other.key == nullptr; });
  *memory = static_cast<int>(closed - memories_.begin());
  if (closed == memories_.end()) memories_.emplace_back();
  memories_[*memory] = opened;
  return {};
}

void UcxNetwork::Close(int memory) {
  Memory& closed = memories_.at(memory);
  if (closed.key != nullptr) ucx_.ucp_rkey_destroy(std::exchange(closed.key, nullptr));
}

Status CheckUcx(const std::string& folder) {
  const UcxLibrary* library = nullptr;
  return OpenUcx(folder, &library);
}

Status MakeUcxNetwork(const UcxOptions& options, std::unique_ptr<Network>* network) {
  const UcxLibrary* library = nullptr;
  if (Status status = OpenUcx(options.folder, &library); !status.ok()) return status;
  auto made = std::make_unique<UcxNetwork>(*library, options);
  if (Status status = made->Begin(options.settings); !status.ok()) return status;
  *network = std::move(made);
  return {};
}

}  // namespace jax_ep
