// Messages between processes: a header, and bytes that depend on it.
#ifndef JAX_EP_RUNTIME_TRANSPORT_LOCAL_FRAME_H_
#define JAX_EP_RUNTIME_TRANSPORT_LOCAL_FRAME_H_

#include <cstdint>
#include <string>
#include <vector>

#include "ffi/runtime/status.h"
#include "ffi/runtime/transport/connection.h"
#include "ffi/runtime/transport/unique_fd.h"

namespace jax_ep {

// A message of a process to the others of a rank group.
struct Frame {
  enum class Kind : uint32_t { kHello, kLeave, kStep, kFailure };
  struct Header {
    Kind kind = Kind::kStep;
    uint32_t step = 0;   // see peer_group.h
    uint64_t group = 0;  // hello: the sender's number
    uint64_t era = 0;
    uint64_t turn = 0;
  };
  Header header;
  std::string bytes;
  std::vector<UniqueFd> descriptors;
};

Status SendFrame(Connection& connection, const Frame::Header& header, const std::string& bytes,
                 const std::vector<int>& descriptors = {});

// Returns false if the message has no whole header.
bool Decode(Message message, Frame* frame);

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_TRANSPORT_LOCAL_FRAME_H_
