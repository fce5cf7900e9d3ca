// The rails of a group whose domains are joined by a network of this process.
#ifndef JAX_EP_TESTS_CPP_GPU_TRANSFER_RAILS_H_
#define JAX_EP_TESTS_CPP_GPU_TRANSFER_RAILS_H_

#include <memory>
#include <vector>

#include "ffi/runtime/calls/workspace.h"
#include "ffi/runtime/network/network_thread.h"
#include "tests/cpp/gpu/transfer/late_network.h"
#include "tests/cpp/gpu/transfer/rank.h"
#include "tests/cpp/gpu/transfer/transfer_options.h"

namespace harness {

class Rails {
 public:
  explicit Rails(const Options& options)
      : domains_(options.ranks, options.domain_size),
        slots_(options.rail_slots > 0 ? static_cast<int>(options.rail_slots)
                                      : jax_ep::RailSlots(domains_.count)),
        network_(new LateNetwork(options.seed)),
        thread_(std::unique_ptr<LateNetwork>(network_)) {}
  ~Rails() { End(); }

  uint64_t num_puts() const { return network_->num_puts(); }

  // Makes a rank's requests for a generation, and says in its state who is reached by them.
  void Prepare(jax_ep::GenerationState* state) {
    jax_ep::RailRequests* requests = nullptr;
    CUDA_OK(
        cudaHostAlloc(&requests, sizeof *requests, cudaHostAllocMapped | cudaHostAllocPortable));
    std::memset(static_cast<void*>(requests), 0, sizeof *requests);
    next_requests_.push_back(requests);
    CUDA_OK(cudaHostGetDevicePointer(reinterpret_cast<void**>(&state->rail_requests), requests, 0));
    jax_ep::SetDomainPeers(state, domains_.size);
  }

  // Serves the ranks that were prepared, once all have begun their generation.
  void Begin(const std::vector<Rank>& ranks) {
    End();
    requests_.swap(next_requests_);
    for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) {
      const auto addresses_of = [&](int other) {
        return jax_ep::RankMemoryAddresses{
            .inbox = reinterpret_cast<uint64_t>(ranks[other].inbox),
            .rails = reinterpret_cast<uint64_t>(ranks[other].workspace) +
                     static_cast<uint64_t>(jax_ep::RailsOffset())};
      };
      std::vector<jax_ep::RankMemoryAddresses> partners;
      for (int rail = 0; rail < domains_.num_rails(); ++rail) {
        partners.push_back(addresses_of(domains_.RailPartner(rank, rail)));
      }
      senders_.push_back(std::make_shared<jax_ep::RailSender>(
          requests_[rank], jax_ep::RailLayout{domains_, rank, slots_}, addresses_of(rank),
          std::vector<int>(partners.size()), partners));
      thread_.Add(senders_.back());
    }
  }

 private:
  void End() {
    for (const auto& sender : senders_) STATUS_OK(thread_.Remove(sender, 20));
    senders_.clear();
    for (jax_ep::RailRequests* requests : requests_) CUDA_OK(cudaFreeHost(requests));
    requests_.clear();
  }

  const jax_ep::Domains domains_;
  const int slots_;
  std::vector<jax_ep::RailRequests*> requests_, next_requests_;
  std::vector<std::shared_ptr<jax_ep::RailSender>> senders_;
  LateNetwork* const network_;  // the thread's
  jax_ep::NetworkThread thread_;
};

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_TRANSFER_RAILS_H_
