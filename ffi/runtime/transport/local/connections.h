// The connections of this process with other processes: those of its host, and over a network. One
// thread receives from all of them, so messages arrive and ends are noticed whatever else the
// process does.
#ifndef JAX_EP_RUNTIME_TRANSPORT_LOCAL_CONNECTIONS_H_
#define JAX_EP_RUNTIME_TRANSPORT_LOCAL_CONNECTIONS_H_

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ffi/runtime/status.h"
#include "ffi/runtime/transport/connection.h"
#include "ffi/runtime/transport/identity.h"
#include "ffi/runtime/transport/local/frame.h"
#include "ffi/runtime/transport/tcp/stream.h"
#include "ffi/runtime/transport/unique_fd.h"

namespace jax_ep {

// Thread-safe.
class Connections {
 public:
  // The calls come from one thread at a time. They must not call Subscribe.
  class Receiver {
   public:
    virtual ~Receiver() = default;
    virtual void OnFrame(uint64_t process, Frame frame) = 0;
    // The process comes no more. `end` is OK if it exits in order; else it says what has happened
    // to it, as "has died".
    virtual void OnEnd(uint64_t process, const Status& end) = 0;
  };

  // Never destroyed: its thread may outlive static destructors.
  static Connections& OfProcess();

  // Returns the name of this process's socket. The first call makes it, and starts the thread.
  Status Address(std::string* address);

  // Listens for processes of other hosts, and writes address and secret into an identity. The first
  // call takes a port, after Address.
  Status ListenOnNetwork(Identity* identity);

  // Waits for a connection with another process, of this host or over the network, up to
  // JAX_EP_ENTRY_TIMEOUT_S. The process with the smaller number connects. It must listen, and make
  // the same call.
  Status ConnectWith(const Identity& other, bool over_network);

  // It is no error if the process has ended: receivers are told.
  Status Send(uint64_t process, const Frame::Header& header, const std::string& bytes,
              const std::vector<int>& descriptors = {});

  // Gives a group's frames to `receiver`, also those that have come before, and all ends.
  void Subscribe(uint64_t group, Receiver* receiver);

  // Tells all others that this process exits in order.
  void Leave();

 private:
  using Shared = std::shared_ptr<Connection>;

  // A fork has the descriptors of its parent: it would hide the parent's end, and speak for it.
  void CloseInForks();
  Status AwaitConnection(const Identity& other, bool over_network);
  void Run();
  void AcceptLocal();
  void AcceptFromNetwork();
  void Greet(const Shared& connection);
  void ReceiveFrom(uint64_t process, Connection& connection);
  void Take(uint64_t process, std::vector<Message> messages, const Status& status);
  void Add(uint64_t process, Shared connection);
  void End(uint64_t process, const Status& end);
  void Deliver(uint64_t process, Frame frame);
  void Wake() const;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::string address_;
  UniqueFd listener_, wake_;
  StreamListener network_;
  std::map<uint64_t, Shared> connections_;  // indexed by the other process
  std::vector<Shared> unnamed_;             // accepted, before their first message
  std::map<uint64_t, Status> ended_;

  std::mutex connecting_;
  std::mutex delivery_;  // held over calls of receivers
  std::map<uint64_t, Receiver*> receivers_;
  std::map<uint64_t, std::vector<std::pair<uint64_t, Frame>>> early_;  // indexed by group
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_TRANSPORT_LOCAL_CONNECTIONS_H_
