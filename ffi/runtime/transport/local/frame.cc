#include "ffi/runtime/transport/local/frame.h"

#include <cstring>
#include <utility>

namespace jax_ep {

Status SendFrame(Connection& connection, const Frame::Header& header, const std::string& bytes,
                 const std::vector<int>& descriptors) {
  std::string message(reinterpret_cast<const char*>(&header), sizeof header);
  return connection.Send(message + bytes, descriptors);
}

bool Decode(Message message, Frame* frame) {
  if (message.bytes.size() < sizeof frame->header) return false;
  std::memcpy(&frame->header, message.bytes.data(), sizeof frame->header);
  frame->bytes = message.bytes.substr(sizeof frame->header);
  frame->descriptors = std::move(message.descriptors);
  return true;
}

}  // namespace jax_ep
