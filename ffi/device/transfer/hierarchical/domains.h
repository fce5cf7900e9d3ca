// NVLink domains: ranks in one domain store to each other, and domains are joined by a network.
// They are consecutive ranks, equally many in each domain. The ranks with one index in their
// domains are rail partners, and a rank sends over the network to its rail partners only.
#ifndef JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_DOMAINS_H_
#define JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_DOMAINS_H_

#include "ffi/device/common/fast_divmod.h"
#include "ffi/device/common/integers.h"

namespace jax_ep {

struct Domains {
  int32_t size;   // N, ranks per domain
  int32_t count;  // D
  FastDivmod size_divmod;

  Domains() = default;
  Domains(int32_t num_ranks, int32_t domain_size)
      : size(domain_size), count(num_ranks / domain_size), size_divmod(domain_size) {}

  JAX_EP_HOST_DEVICE int num_rails() const { return count - 1; }
  JAX_EP_HOST_DEVICE int Domain(int rank) const { return size_divmod.Quotient(rank); }
  JAX_EP_HOST_DEVICE int Index(int rank) const { return rank - Domain(rank) * size; }
  JAX_EP_HOST_DEVICE int Rank(int domain, int index) const { return domain * size + index; }

  JAX_EP_HOST_DEVICE bool ArePartners(int rank, int other) const {
    return rank != other && Index(rank) == Index(other);
  }

  // Returns the rank with the index of `rank` in the domain of `other`.
  JAX_EP_HOST_DEVICE int Partner(int rank, int other) const {
    return Rank(Domain(other), Index(rank));
  }

  // Returns the rail from one domain to another, numbered from 0 there: each domain begins with the
  // next one.
  JAX_EP_HOST_DEVICE int Rail(int from, int to) const {
    return (to > from ? to - from : to - from + count) - 1;
  }
  // Returns the domain at the other end of a rail.
  JAX_EP_HOST_DEVICE int RailEnd(int from, int rail) const {
    const int to = from + rail + 1;
    return to < count ? to : to - count;
  }
  // Returns the rank at the other end of a rank's rail.
  JAX_EP_HOST_DEVICE int RailPartner(int rank, int rail) const {
    return Rank(RailEnd(Domain(rank), rail), Index(rank));
  }
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_DOMAINS_H_
