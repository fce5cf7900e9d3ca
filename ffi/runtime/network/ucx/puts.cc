// Puts in flight. The bytes are put, then all of the endpoint is flushed, and when both are done
// the flag is put. Any number of puts are in flight, each with a flush of its own: ucp_worker_fence
// would wait in the middle of Start.
//
// A flag is one store of 8 bytes: rc and dc write it in one PCIe transaction; tcp, posix and sysv
// send it in one active message, which the partner copies by memcpy into host memory and by
// cuMemcpyAsync of cuda_copy into GPU memory; cuda_ipc by cuMemcpyAsync. That these copy 8 aligned
// bytes at once is what CPUs and GPUs do, and no specification promises.
#include <algorithm>

#include "ffi/runtime/network/ucx/ucx_network.h"

namespace jax_ep {
namespace {

constexpr int kPutsOfSlab = 256;

}  // namespace

bool UcxNetwork::Memory::Has(uint64_t address, size_t bytes) const {
  return address >= begin && address - begin <= size && bytes <= size - (address - begin);
}

Status UcxNetwork::Check(const Put& put, const Memory& memory, ucp_mem_h source) const {
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
      slab[i].memory = worker_.Find(slab.get(), bytes);
      free_.push_back(&slab[i]);
    }
    slabs_.push_back(std::move(slab));
  }
  *flight = free_.back();
  free_.pop_back();
  return {};
}

// Starts an operation of UCX for a put.
template <typename Operation>
void UcxNetwork::Track(Flight* flight, const Operation& operation) {
  ucp_request_param_t parameters = {};
  parameters.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  parameters.cb.send = &UcxNetwork::OnPart;
  parameters.user_data = flight;
  ++flight->operations;
  const ucs_status_ptr_t request = operation(&parameters);
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
  const ucp_mem_h source = worker_.Find(put.from, put.bytes);
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
  if (connection->in_flight++ == 0 && !connection->is_flushing) connection->since = Clock::now();
  if (put.bytes > 0) {
    Track(flight, [&](ucp_request_param_t* parameters) {
      parameters->op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
      parameters->memh = source;
      return ucx_.ucp_put_nbx(connection->endpoint, put.from, put.bytes, put.to, memory.key,
                              parameters);
    });
    if (connection->failure.ok()) {
      Track(flight, [&](ucp_request_param_t* parameters) {
        return ucx_.ucp_ep_flush_nbx(connection->endpoint, parameters);
      });
    }
  }
  if (flight->operations == 0) Continue(flight);
  return connection->failure;
}

// Called when no operation of a put is under way: sends the flag, then ends the put. After a
// failure no flag is sent.
void UcxNetwork::Continue(Flight* flight) {
  Connection* const connection = flight->connection;
  if (!flight->has_flag_sent && connection->failure.ok()) {
    flight->has_flag_sent = true;
    Track(flight, [&](ucp_request_param_t* parameters) {
      parameters->op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
      parameters->memh = flight->memory;
      return ucx_.ucp_put_nbx(connection->endpoint, &flight->value, sizeof flight->value,
                              flight->flag, flight->key, parameters);
    });
    if (flight->operations > 0) return;
  }
  --connection->in_flight;
  connection->is_flushed = false;
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
      " has failed: ", reason,
      ". Has its process ended, or is its network cut? Look at the partner's log");
  if (failure_.ok()) failure_ = connection->failure;
}

Status UcxNetwork::Progress() {
  ucx_.ucp_worker_progress(worker_.get());
  for (size_t i = 0; i < ready_.size(); ++i) Continue(ready_[i]);
  ready_.clear();
  for (const auto& connection : connections_) {
    const bool is_active = connection->in_flight > 0 || connection->is_flushing;
    if (!connection->failure.ok()) continue;
    if (is_active && Clock::now() - connection->since > deadline_) {
      Fail(connection.get(),
           Concatenate(connection->in_flight, " puts are in flight, and none has arrived for ",
                       std::chrono::duration<double>(deadline_).count(), " s"));
    }
    if (!is_active && !connection->is_flushed) Flush(connection.get());
  }
  return failure_;
}

bool UcxNetwork::IsIdle() const {
  return std::all_of(connections_.begin(), connections_.end(), [](const auto& connection) {
    return connection->in_flight == 0 && !connection->is_flushing && connection->is_flushed &&
           connection->failure.ok();
  });
}

}  // namespace jax_ep
