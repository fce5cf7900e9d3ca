// The network between a GPU and its rail partners, in processes of other NVLink domains. A provider
// implements it.
#ifndef JAX_EP_RUNTIME_NETWORK_NETWORK_H_
#define JAX_EP_RUNTIME_NETWORK_NETWORK_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "ffi/runtime/status.h"

namespace jax_ep {

// Bytes into a partner's memory, then a flag: who finds the flag there finds the bytes. Nothing is
// known of the order of two puts.
struct Put {
  int memory;                  // the partner's, see Network::Open
  const void* from = nullptr;  // registered memory of this process, unchanged until it has arrived
  uint64_t to = 0;             // an address in the partner's process
  size_t bytes = 0;            // may be 0
  uint64_t flag;               // an address there, of 8 bytes, which are written at once
  uint64_t value;              // the flag's
};

// Used by one thread at a time.
class Network {
 public:
  // Ends in bounded time, whatever partners do. One that still makes progress takes it for a
  // failure: all agree first that they are idle.
  virtual ~Network() = default;

  // Registers memory, which partners put into and puts read from. Returns a key for partners.
  virtual Status Register(void* address, size_t bytes, std::string* key) = 0;
  // Call it when no put reads the memory, and none of a partner writes it.
  virtual Status Unregister(void* address) = 0;

  // Returns what Connect needs on a partner.
  virtual Status Address(std::string* address) = 0;
  // Connects to a partner by its address. Connections are numbered from 0.
  virtual Status Connect(const std::string& address, int* connection) = 0;
  // Opens memory that the partner has registered, by its key.
  virtual Status Open(int connection, const std::string& key, int* memory) = 0;
  virtual void Close(int memory) = 0;

  // Starts a put. An error of an earlier one may be returned, too. After an error of a connection
  // no flag is put on it any more, and Progress returns the error each time: what remains is to
  // destroy the network. Only then nothing reads the memory of puts that were in flight.
  virtual Status Start(const Put& put) = 0;
  // Makes progress on puts of this process and on those that arrive, without a wait.
  virtual Status Progress() = 0;
  // Whether all puts that were started have arrived.
  virtual bool IsIdle() const = 0;

  // Kernels put by themselves over some networks (device/protocol/symmetric_rails.h), which have
  // memory of their own for that. Put is for probes there. The others need nothing of this.
  virtual bool KernelsPut() const { return false; }
  // Allocates memory to be registered. If there is not enough, sets `out_of_memory`.
  virtual Status Allocate(size_t /*bytes*/, void** /*address*/, bool* /*out_of_memory*/) {
    return Unimplemented("the network allocates no memory");
  }
  virtual void Free(void* /*address*/) {}
  // Returns what a kernel puts to, for an address in the partner's process.
  struct Target {
    uint64_t address = 0;
    int process = 0;
  };
  virtual Target TargetOf(int /*memory*/, uint64_t /*address*/) const { return {}; }
  // Returns by which address this process loads and stores there itself, or 0.
  virtual uint64_t Map(int /*memory*/, uint64_t /*address*/) const { return 0; }
  // Waits until all that kernels have put has arrived. An error if that takes longer.
  virtual Status Flush(double /*seconds*/) { return {}; }

  // Names the library and what carries the connection's bytes, for messages.
  virtual std::string Describe(int connection) const = 0;
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_NETWORK_NETWORK_H_
