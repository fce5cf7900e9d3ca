// Puts in flight. By RDMA and cuda_ipc the bytes are put, then all of the endpoint is flushed, and
// when both are done the flag is sent. Any number of puts are in flight, each with a flush of its
// own: ucp_worker_fence would wait in the middle of Start.
//
// A flag by RDMA is a write of 8 aligned bytes, which NICs carry out in one PCIe transaction; no
// specification promises that. Other flags are in messages, see messages.cc.
#include <algorithm>

#include "ffi/runtime/network/ucx/ucx_network.h"

namespace jax_ep {
namespace {

constexpr int kPutsOfSlab = 256;

}  // namespace

bool UcxNetwork::Memory::Has(uint64_t address, size_t bytes) const {
  return address >= begin && address - begin <= size && bytes <= size - (address - begin);
}

Status UcxNetwork::Check(const Put& put, const Memory& memory,
                         const UcxWorker::Mapping* source) const {
  if (put.bytes > 0 && source == nullptr) {
    return InvalidArgument("jax_ep: a put reads ", put.bytes, " bytes at ", put.from,
                           "; expected registered memory");
  }
  if ((put.bytes > 0 && !memory.Has(put.to, put.bytes)) ||
      !memory.Has(put.flag, sizeof put.value) || put.flag % sizeof put.value != 0) {
    return InvalidArgument("jax_ep: a put writes ", put.bytes, " bytes at ", put.to,
                           " and a flag at ", put.flag, "; expected addresses in the ", memory.size,
                           " bytes at ", memory.begin, " of the partner, and an aligned flag");
  }
  return {};
}

Status UcxNetwork::TakeFlight(Flight** flight) {
  if (free_.empty()) {
    auto slab = std::make_unique<Flight[]>(kPutsOfSlab);
    const size_t bytes = kPutsOfSlab * sizeof(Flight);
    if (Status status = worker_.Map(slab.get(), bytes); !status.ok()) return status;
    for (int i = kPutsOfSlab - 1; i >= 0; --i) {
      slab[i].memory = worker_.Find(slab.get(), bytes)->handle;
      free_.push_back(&slab[i]);
    }
    slabs_.push_back(std::move(slab));
  }
  *flight = free_.back();
  free_.pop_back();
  return {};
}

// The parameters of an operation of UCX for a put. EndOperation takes what the operation returns.
ucp_request_param_t UcxNetwork::BeginOperation(Flight* flight) {
  ucp_request_param_t parameters = {};
  parameters.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  parameters.cb.send = &UcxNetwork::OnPart;
  parameters.user_data = flight;
  ++flight->operations;
  return parameters;
}

void UcxNetwork::EndOperation(Flight* flight, ucs_status_ptr_t request) {
  if (UCS_PTR_IS_PTR(request)) return;  // its callback comes
  --flight->operations;
  if (UCS_PTR_IS_ERR(request)) Fail(flight->connection, UCS_PTR_STATUS(request));
}

void UcxNetwork::OnPart(void* request, ucs_status_t status, void* flight) {
  auto* const of = static_cast<Flight*>(flight);
  UcxNetwork* const network = of->connection->network;
  network->ucx_.ucp_request_free(request);
  if (status != UCS_OK) network->Fail(of->connection, status);
  if (--of->operations == 0) network->ready_.push_back(of);
}

Status UcxNetwork::Start(const Put& put) {
  if (put.memory < 0 || put.memory >= static_cast<int>(memories_.size()) ||
      memories_[put.memory].key == nullptr) {
    return InvalidArgument("jax_ep: a put goes to memory ", put.memory, ", which is not open");
  }
  const Memory& memory = memories_[put.memory];
  Connection* const connection = memory.connection;
  if (!connection->failure.ok()) return connection->failure;
  const UcxWorker::Mapping* const source = worker_.Find(put.from, put.bytes);
  Flight* flight = nullptr;
  Status status = Check(put, memory, source);
  if (status.ok()) status = TakeFlight(&flight);
  if (!status.ok()) return status;
  *flight = {.value = put.value,
             .flag = put.flag,
             .connection = connection,
             .key = memory.key,
             .memory = flight->memory,
             .operations = 0,
             .has_flag_sent = false};
  if (IsIdle(*connection)) connection->since = Clock::now();
  ++connection->in_flight;
  if (!connection->puts_bytes) {
    SendMessages(flight, put, source != nullptr ? source->handle : nullptr);
  } else if (put.bytes > 0) {
    PutBytes(flight, put, source->handle);
  }
  if (flight->operations == 0) Continue(flight);
  return connection->failure;
}

void UcxNetwork::PutBytes(Flight* flight, const Put& put, ucp_mem_h source) {
  Connection* const connection = flight->connection;
  ucp_request_param_t parameters = BeginOperation(flight);
  parameters.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
  parameters.memh = source;
  EndOperation(flight, ucx_.ucp_put_nbx(connection->endpoint, put.from, put.bytes, put.to,
                                        flight->key, &parameters));
  if (!connection->failure.ok()) return;
  parameters = BeginOperation(flight);
  EndOperation(flight, ucx_.ucp_ep_flush_nbx(connection->endpoint, &parameters));
}

void UcxNetwork::PutFlag(Flight* flight) {
  ucp_request_param_t parameters = BeginOperation(flight);
  parameters.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
  parameters.memh = flight->memory;
  flight->connection->is_flushed = false;
  EndOperation(flight,
               ucx_.ucp_put_nbx(flight->connection->endpoint, &flight->value, sizeof flight->value,
                                flight->flag, flight->key, &parameters));
}

// Called when no operation of a put is under way: sends the flag, then ends the put. After a
// failure no flag is sent.
void UcxNetwork::Continue(Flight* flight) {
  Connection* const connection = flight->connection;
  if (!flight->has_flag_sent && connection->failure.ok()) {
    flight->has_flag_sent = true;
    if (connection->puts_flags) {
      PutFlag(flight);
    } else {
      const Put flag = {.memory = 0, .flag = flight->flag, .value = flight->value};
      SendMessages(flight, flag, nullptr);
    }
    if (flight->operations > 0) return;
  }
  --connection->in_flight;
  connection->since = Clock::now();
  free_.push_back(flight);
}

// Waits for the last flags to arrive: until now they have only been copied.
void UcxNetwork::Flush(Connection* connection) {
  connection->is_flushed = true;
  connection->is_flushing = true;
  ucp_request_param_t parameters = {};
  parameters.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  parameters.cb.send = &UcxNetwork::OnFlushed;
  parameters.user_data = connection;
  const ucs_status_ptr_t request = ucx_.ucp_ep_flush_nbx(connection->endpoint, &parameters);
  if (UCS_PTR_IS_PTR(request)) return;
  connection->is_flushing = false;
  if (UCS_PTR_IS_ERR(request)) Fail(connection, UCS_PTR_STATUS(request));
}

void UcxNetwork::OnFlushed(void* request, ucs_status_t status, void* connection) {
  auto* const of = static_cast<Connection*>(connection);
  of->network->ucx_.ucp_request_free(request);
  of->is_flushing = false;
  of->since = Clock::now();
  if (status != UCS_OK) of->network->Fail(of, status);
}

void UcxNetwork::OnFailure(void* connection, ucp_ep_h, ucs_status_t status) {
  auto* const of = static_cast<Connection*>(connection);
  of->network->Fail(of, status);
}

void UcxNetwork::Fail(Connection* connection, ucs_status_t status) {
  Fail(connection, ucx_.ucs_status_string(status));
}

void UcxNetwork::Fail(Connection* connection, const std::string& reason) {
  if (!connection->failure.ok()) return;
  connection->failure = FailedPrecondition(
      "jax_ep: the connection to partner ", connection->index, " by ", Describe(*connection),
      " has failed: ", reason, ". Has its process ended, or is its network cut? Look at its log");
  if (failure_.ok()) failure_ = connection->failure;
}

Status UcxNetwork::Progress() {
  ucx_.ucp_worker_progress(worker_.get());
  for (size_t i = 0; i < ready_.size(); ++i) Continue(ready_[i]);
  ready_.clear();
  WriteDeviceFlags();
  TellArrivals();
  for (const auto& connection : connections_) {
    if (!connection->failure.ok() || IsIdle(*connection)) continue;
    if (Clock::now() - connection->since > deadline_) {
      Fail(connection.get(), Concatenate("puts are in flight, and none has arrived for ",
                                         std::chrono::duration<double>(deadline_).count(), " s"));
    } else if (connection->in_flight == 0 && !connection->is_flushed) {
      Flush(connection.get());
    }
  }
  return failure_;
}

bool UcxNetwork::IsIdle(const Connection& connection) {
  return connection.in_flight == 0 && !connection.is_flushing && connection.is_flushed &&
         connection.arrived == connection.sent;
}

bool UcxNetwork::IsIdle() const {
  return std::all_of(connections_.begin(), connections_.end(), [](const auto& connection) {
    return connection->failure.ok() && IsIdle(*connection);
  });
}

}  // namespace jax_ep
