// Addresses and memory keys for partners: bytes that only UCX understands, and that it takes
// without a check. Here they get a length, a version and a checksum.
#ifndef JAX_EP_RUNTIME_NETWORK_UCX_PACKED_H_
#define JAX_EP_RUNTIME_NETWORK_UCX_PACKED_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "ffi/runtime/network/ucx/library.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

struct UcxPacked {
  enum class Kind : uint32_t { kAddress = 1, kKey = 2 };
  Kind kind;
  uint64_t begin = 0;  // where a key's memory is in its process; an address's worker
  uint64_t size = 0;
  std::string content;
};

std::string Pack(const UcxLibrary& library, const UcxPacked& message);

// Refuses bytes that are damaged, of another kind, or of another version of UCX. It protects
// against mistakes, not against an attacker.
Status Unpack(const UcxLibrary& library, std::string_view bytes, UcxPacked::Kind kind,
              UcxPacked* message);

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_NETWORK_UCX_PACKED_H_
