// The thread that carries out the puts of a GPU. It makes progress always, between calls too: a
// kernel cannot wake it, and some networks need it for what arrives. Where kernels put by
// themselves, it sleeps but for tasks and probes.
#ifndef JAX_EP_RUNTIME_NETWORK_NETWORK_THREAD_H_
#define JAX_EP_RUNTIME_NETWORK_NETWORK_THREAD_H_

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "ffi/runtime/network/network.h"
#include "ffi/runtime/network/rail_sender.h"

namespace jax_ep {

// Thread-safe.
class NetworkThread {
 public:
  // The thread calls `begin` first.
  explicit NetworkThread(std::unique_ptr<Network> network, std::function<void()> begin = [] {});
  // Puts that were started may not arrive.
  ~NetworkThread() { Stop(); }
  NetworkThread(const NetworkThread&) = delete;
  NetworkThread& operator=(const NetworkThread&) = delete;

  // Runs a task on the thread, for example to register memory, and returns its status.
  Status Run(const std::function<Status(Network&)>& task);

  // Serves a rank's requests until Remove.
  void Add(std::shared_ptr<RailSender> sender);
  // Returns when all that was asked for has arrived, and the sender is not used any more. An error
  // if that takes longer than `seconds`.
  Status Remove(const std::shared_ptr<RailSender>& sender, double seconds);

  // Ends the thread. Then tasks fail.
  void Stop();

  // The first error of the network, or OK. After it nothing is put any more.
  Status Failure() const;

 private:
  void Loop();
  void RunTask();
  void AwaitTask();
  Status Step(bool* found);

  // The thread's own.
  const std::unique_ptr<Network> network_;
  const std::function<void()> begin_;
  std::vector<std::shared_ptr<RailSender>> senders_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  const std::function<Status(Network&)>* task_ = nullptr;
  Status* task_status_ = nullptr;
  Status failure_;
  std::atomic<bool> has_task_ = false;  // so that a step takes no lock
  std::atomic<bool> stops_ = false;
  bool has_stopped_ = false;
  std::thread thread_;
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_NETWORK_NETWORK_THREAD_H_
