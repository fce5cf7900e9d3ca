// The implementation of a network by UCX. ucx.h makes one.
#ifndef JAX_EP_RUNTIME_NETWORK_UCX_UCX_NETWORK_H_
#define JAX_EP_RUNTIME_NETWORK_UCX_UCX_NETWORK_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ffi/runtime/network/network.h"
#include "ffi/runtime/network/ucx/ucx.h"
#include "ffi/runtime/network/ucx/worker.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

class UcxNetwork final : public Network {
 public:
  UcxNetwork(const UcxLibrary& library, const UcxOptions& options);
  ~UcxNetwork() override;

  Status Begin(const UcxSettings& settings) { return worker_.Start(settings); }

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
    ucp_ep_h endpoint = nullptr;
    bool tells_failures = true;  // calls the handler, and closes at once
    std::string transports;
    Status failure;
    int in_flight = 0;       // puts whose flag has not been copied by UCX
    bool is_flushed = true;  // all flags that were copied have arrived, or a flush is under way
    bool is_flushing = false;
    Clock::time_point since;  // the last sign of life while puts are in flight
  };

  struct Memory {
    Connection* connection = nullptr;
    ucp_rkey_h key = nullptr;  // null if it is closed
    uint64_t begin = 0;
    uint64_t size = 0;

    bool Has(uint64_t address, size_t bytes) const;
  };

  // A put, from Start until its flag has been copied. UCX reads the flag's value here.
  struct Flight {
    uint64_t value;
    uint64_t flag;
    Connection* connection;
    ucp_rkey_h key;
    ucp_mem_h memory;  // contains this
    int operations;    // counts those of UCX under way
    bool has_flag_sent;
  };

  Status CreateEndpoint(const std::string& address, Connection* connection) const;
  std::string Transports(ucp_ep_h endpoint) const;
  std::string Describe(const Connection& connection) const;

  Status Check(const Put& put, const Memory& memory, ucp_mem_h source) const;
  Status TakeFlight(Flight** flight);
  void Continue(Flight* flight);
  void Flush(Connection* connection);
  void Fail(Connection* connection, const std::string& reason);
  void Fail(Connection* connection, ucs_status_t status);
  template <typename Operation>
  void Track(Flight* flight, const Operation& operation);

  static void OnFailure(void* connection, ucp_ep_h endpoint, ucs_status_t status);
  static void OnPart(void* request, ucs_status_t status, void* flight);
  static void OnFlushed(void* request, ucs_status_t status, void* connection);

  const UcxLibrary& ucx_;
  const Clock::duration deadline_;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::vector<Memory> memories_;
  std::vector<std::unique_ptr<Flight[]>> slabs_;
  std::vector<Flight*> free_;
  std::vector<Flight*> ready_;  // filled by callbacks, in which UCX is not called
  Status failure_;              // tells why the first connection failed
  UcxWorker worker_;            // ends first: until then it uses what is above
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_NETWORK_UCX_UCX_NETWORK_H_
