// Puts in messages, for networks without RDMA. ucp_put_nbx would do the same there, but until 1.22
// UCX ends the process when a partner dies while it answers a put. Each message has the put's
// header, so that they may arrive in any order. The partner tells how many puts have arrived.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "ffi/runtime/network/ucx/ucx_network.h"

namespace jax_ep {

struct UcxPutHeader {
  uint64_t worker;      // the sender's
  uint64_t connection;  // likewise
  uint64_t number;      // counts puts of the connection
  uint64_t put_bytes;
  uint64_t to;  // this message's bytes
  uint64_t flag;
  uint64_t value;
};

namespace {

struct ArrivalsHeader {
  uint64_t worker;      // the one that tells
  uint64_t connection;  // the other one's
  uint64_t count;
};

constexpr unsigned kPutMessage = 0, kArrivalsMessage = 1;
constexpr size_t kMessageBytes = 60 * 1024;  // a packet of tcp holds them
constexpr std::chrono::microseconds kPauseBetweenNews{50};
constexpr uint32_t kFlags = UCP_AM_SEND_FLAG_EAGER | UCP_AM_SEND_FLAG_COPY_HEADER;

}  // namespace

Status UcxNetwork::ListenToMessages() {
  ucp_am_handler_param_t parameters = {};
  parameters.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                          UCP_AM_HANDLER_PARAM_FIELD_ARG;
  parameters.arg = this;
  for (const unsigned id : {kPutMessage, kArrivalsMessage}) {
    parameters.id = id;
    parameters.cb = id == kPutMessage ? &UcxNetwork::OnPutMessage : &UcxNetwork::OnArrivals;
    const ucs_status_t error = ucx_.ucp_worker_set_am_recv_handler(worker_.get(), &parameters);
    if (error == UCS_OK) continue;
    return FailedPrecondition("jax_ep: UCX ", ucx_.version,
                              " takes no messages: ", ucx_.ucs_status_string(error));
  }
  return {};
}

void UcxNetwork::SendMessages(Flight* flight, const Put& put, ucp_mem_h source) {
  Connection* const connection = flight->connection;
  flight->has_flag_sent = true;
  UcxPutHeader header = {.worker = worker_.id(),
                         .connection = static_cast<uint64_t>(connection->index),
                         .number = ++connection->sent,
                         .put_bytes = put.bytes,
                         .to = put.to,
                         .flag = put.flag,
                         .value = put.value};
  const char* from = static_cast<const char*>(put.from);
  const uint64_t end = put.to + put.bytes;
  do {
    const size_t bytes = std::min<size_t>(end - header.to, kMessageBytes);
    ucp_request_param_t parameters = BeginOperation(flight);
    parameters.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
    parameters.flags = kFlags;
    if (bytes > 0) {
      parameters.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
      parameters.memh = source;
    }
    EndOperation(flight, ucx_.ucp_am_send_nbx(connection->endpoint, kPutMessage, &header,
                                              sizeof header, from, bytes, &parameters));
    header.to += bytes;
    from += bytes;
  } while (header.to < end && connection->failure.ok());
}

ucs_status_t UcxNetwork::OnPutMessage(void* network, const void* header, size_t header_bytes,
                                      void* bytes, size_t size, const ucp_am_recv_param_t*) {
  auto* const self = static_cast<UcxNetwork*>(network);
  UcxPutHeader put = {};
  if (header_bytes != sizeof put) return UCS_OK;
  std::memcpy(&put, header, sizeof put);
  const Status status = self->Receive(put, bytes, size);
  if (status.ok()) return UCS_OK;
  if (Connection* const connection = self->FindConnection(put.worker)) {
    self->Fail(connection, status.message);
  } else if (self->failure_.ok()) {
    self->failure_ = status;
  }
  return UCS_OK;
}

Status UcxNetwork::Receive(const UcxPutHeader& put, const void* bytes, size_t size) {
  Arrivals& arrivals = arrivals_[{put.worker, put.connection}];
  if (size > 0) {
    if (Status status = Store(put.to, bytes, size); !status.ok()) return status;
  }
  if (size < put.put_bytes) {
    uint64_t& arrived = arrivals.partly[put.number];
    arrived += size;
    if (arrived < put.put_bytes) return {};
    arrivals.partly.erase(put.number);
  }
  ++arrivals.count;
  has_news_ = true;
  return Store(put.flag, &put.value, sizeof put.value);
}

// Writes into registered memory. An aligned word is written at once, after all that was before it.
Status UcxNetwork::Store(uint64_t to, const void* from, size_t bytes) {
  void* const place = reinterpret_cast<void*>(to);
  const UcxWorker::Mapping* const mapping = worker_.Find(place, bytes);
  if (mapping == nullptr) {
    return FailedPrecondition("jax_ep: a partner puts ", bytes, " bytes at ", place,
                              "; expected registered memory");
  }
  if (!mapping->is_host && device_memory_ == nullptr) {
    return FailedPrecondition(
        "jax_ep: a partner puts into GPU memory by messages; expected "
        "UcxOptions::device_memory");
  }
  if (bytes == sizeof(uint64_t) && to % sizeof(uint64_t) == 0) {
    uint64_t value = 0;
    std::memcpy(&value, from, sizeof value);
    if (!mapping->is_host) {
      device_flags_.push_back({place, value});
      return {};
    }
    std::atomic_ref(*static_cast<uint64_t*>(place)).store(value, std::memory_order_release);
    return {};
  }
  if (!mapping->is_host) return device_memory_->Copy(place, from, bytes);
  std::memcpy(place, from, bytes);
  return {};
}

// Called after progress: one call of the driver writes all that have arrived meanwhile.
void UcxNetwork::WriteDeviceFlags() {
  if (device_flags_.empty()) return;
  const Status status = device_memory_->WriteFlags(device_flags_);
  device_flags_.clear();
  if (!status.ok() && failure_.ok()) failure_ = status;
}

UcxNetwork::Connection* UcxNetwork::FindConnection(uint64_t partner) const {
  for (const auto& connection : connections_) {
    if (connection->partner == partner) return connection.get();
  }
  return nullptr;
}

// Called after progress: one message tells of all puts that have arrived meanwhile, now and then,
// since a wait for flags on a GPU takes as long as several of them.
void UcxNetwork::TellArrivals() {
  if (!has_news_ || Clock::now() - told_at_ < kPauseBetweenNews) return;
  if (device_memory_ != nullptr) {
    if (Status status = device_memory_->AwaitFlags(); !status.ok()) {
      if (failure_.ok()) failure_ = status;
      return;
    }
  }
  has_news_ = false;
  told_at_ = Clock::now();
  for (auto& [from, arrivals] : arrivals_) {
    if (arrivals.count == arrivals.told) continue;
    Connection* const connection = FindConnection(from.first);
    if (connection == nullptr || !connection->failure.ok()) continue;
    arrivals.told = arrivals.count;
    const ArrivalsHeader header = {
        .worker = worker_.id(), .connection = from.second, .count = arrivals.count};
    ucp_request_param_t parameters = {};
    parameters.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    parameters.flags = kFlags;
    const ucs_status_ptr_t request = ucx_.ucp_am_send_nbx(
        connection->endpoint, kArrivalsMessage, &header, sizeof header, nullptr, 0, &parameters);
    if (UCS_PTR_IS_ERR(request)) Fail(connection, UCS_PTR_STATUS(request));
    if (UCS_PTR_IS_PTR(request)) ucx_.ucp_request_free(request);
  }
}

ucs_status_t UcxNetwork::OnArrivals(void* network, const void* header, size_t header_bytes, void*,
                                    size_t, const ucp_am_recv_param_t*) {
  auto* const self = static_cast<UcxNetwork*>(network);
  ArrivalsHeader told = {};
  if (header_bytes != sizeof told) return UCS_OK;
  std::memcpy(&told, header, sizeof told);
  if (told.connection >= self->connections_.size()) return UCS_OK;
  Connection& connection = *self->connections_[told.connection];
  if (connection.partner != told.worker || told.count > connection.sent) return UCS_OK;
  connection.arrived = std::max(connection.arrived, told.count);
  connection.since = Clock::now();
  return UCS_OK;
}

}  // namespace jax_ep
