// The implementation of a network by UCX. ucx.h makes one.
#ifndef JAX_EP_RUNTIME_NETWORK_UCX_UCX_NETWORK_H_
#define JAX_EP_RUNTIME_NETWORK_UCX_UCX_NETWORK_H_

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ffi/runtime/network/network.h"
#include "ffi/runtime/network/ucx/ucx.h"
#include "ffi/runtime/network/ucx/worker.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

struct UcxPutHeader;

class UcxNetwork final : public Network {
 public:
  UcxNetwork(const UcxLibrary& library, const UcxOptions& options);
  ~UcxNetwork() override;

  Status Begin(const UcxSettings& settings);

  Status Register(void* address, size_t bytes, std::string* key) override;
  Status Unregister(void* address) override { return worker_.Unmap(address); }
  Status Address(std::string* address) override { return worker_.Address(address); }
  Status Connect(const std::string& address, int* connection) override;
  Status Open(int connection, const std::string& key, int* memory) override;
  void Close(int memory) override;
  Status Start(const Put& put) override;
  Status Progress() override;
  bool IsIdle() const override;
  std::string Describe(int connection) const override;

 private:
  using Clock = std::chrono::steady_clock;

  struct Connection {
    UcxNetwork* network;
    int index;
    uint64_t partner;  // its worker
    ucp_ep_h endpoint = nullptr;
    bool tells_failures = true;  // calls the handler, and closes at once
    bool puts_bytes = false;     // goes by RDMA or cuda_ipc, not in messages
    bool puts_flags = false;     // goes by RDMA
    std::string transports;
    Status failure;
    int in_flight = 0;       // puts that UCX has not copied
    bool is_flushed = true;  // all flags that were put have arrived, or a flush is under way
    bool is_flushing = false;
    uint64_t sent = 0;        // flags in messages
    uint64_t arrived = 0;     // counts those of which the partner has told
    Clock::time_point since;  // the last sign of life while puts are in flight
  };

  struct Memory {
    Connection* connection = nullptr;
    ucp_rkey_h key = nullptr;  // null if it is closed
    uint64_t begin = 0;
    uint64_t size = 0;

    bool Has(uint64_t address, size_t bytes) const;
  };

  // A put, from Start until UCX has copied all of it. UCX reads the flag's value here.
  struct Flight {
    uint64_t value;
    uint64_t flag;
    Connection* connection;
    ucp_rkey_h key;
    ucp_mem_h memory;  // contains this
    int operations;    // counts those of UCX under way
    bool has_flag_sent;
  };

  // Messages from one connection of a partner.
  struct Arrivals {
    uint64_t count = 0;                   // flags that have arrived
    uint64_t told = 0;                    // as many are known to the partner
    std::map<uint64_t, uint64_t> partly;  // bytes that have arrived, by the put's number
  };

  // ucx_network.cc
  Status CreateEndpoint(const std::string& address, Connection* connection) const;
  std::string Transports(ucp_ep_h endpoint) const;
  void ChooseWay(Connection* connection) const;
  std::string Describe(const Connection& connection) const;

  // puts.cc
  static bool IsIdle(const Connection& connection);
  Status Check(const Put& put, const Memory& memory, const UcxWorker::Mapping* source) const;
  Status TakeFlight(Flight** flight);
  ucp_request_param_t BeginOperation(Flight* flight);
  void EndOperation(Flight* flight, ucs_status_ptr_t request);
  void PutBytes(Flight* flight, const Put& put, ucp_mem_h source);
  void PutFlag(Flight* flight);
  void Continue(Flight* flight);
  void Flush(Connection* connection);
  void Fail(Connection* connection, const std::string& reason);
  void Fail(Connection* connection, ucs_status_t status);
  static void OnFailure(void* connection, ucp_ep_h endpoint, ucs_status_t status);
  static void OnPart(void* request, ucs_status_t status, void* flight);
  static void OnFlushed(void* request, ucs_status_t status, void* connection);

  // messages.cc
  Status ListenToMessages();
  void SendMessages(Flight* flight, const Put& put, ucp_mem_h source);
  Status Receive(const UcxPutHeader& put, const void* bytes, size_t size);
  Status Store(uint64_t to, const void* from, size_t bytes);
  void WriteDeviceFlags();
  void TellArrivals();
  Connection* FindConnection(uint64_t partner) const;
  static ucs_status_t OnPutMessage(void* network, const void* header, size_t header_bytes,
                                   void* bytes, size_t size, const ucp_am_recv_param_t* parameters);
  static ucs_status_t OnArrivals(void* network, const void* header, size_t header_bytes,
                                 void* bytes, size_t size, const ucp_am_recv_param_t* parameters);

  const UcxLibrary& ucx_;
  const Clock::duration deadline_;
  const std::shared_ptr<UcxDeviceMemory> device_memory_;
  const UcxWay way_;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::vector<Memory> memories_;
  std::vector<std::unique_ptr<Flight[]>> slabs_;
  std::vector<Flight*> free_;
  std::vector<Flight*> ready_;  // filled by callbacks, in which UCX is not called
  // A partner is told apart by its worker and the number of its connection.
  std::map<std::pair<uint64_t, uint64_t>, Arrivals> arrivals_;
  std::vector<UcxFlag> device_flags_;  // have arrived, and are written after UCX's progress
  bool has_news_ = false;              // flags have arrived of which partners do not know
  Clock::time_point told_at_ = {};
  Status failure_;    // tells why the first connection failed
  UcxWorker worker_;  // ends first: until then it uses what is above
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_NETWORK_UCX_UCX_NETWORK_H_
