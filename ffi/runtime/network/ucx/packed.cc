#include "ffi/runtime/network/ucx/packed.h"

#include <cstring>

namespace jax_ep {
namespace {

constexpr uint64_t kMagic = 0x31786375'7065616a;  // "jaepucx1"

struct Header {
  uint64_t magic;
  uint32_t kind;
  uint32_t major;
  uint32_t minor;
  uint32_t content_bytes;
  uint64_t begin;
  uint64_t size;
  uint64_t checksum;  // covers all else
};

// FNV-1a.
uint64_t Hash(std::string_view bytes, uint64_t hash = 0xcbf29ce484222325) {
  for (const unsigned char byte : bytes) hash = (hash ^ byte) * 0x100000001b3;
  return hash;
}

uint64_t Checksum(Header header, std::string_view content) {
  header.checksum = 0;
  return Hash(content, Hash({reinterpret_cast<const char*>(&header), sizeof header}));
}

const char* Name(UcxPacked::Kind kind) {
  return kind == UcxPacked::Kind::kAddress ? "address" : "memory key";
}

}  // namespace

std::string Pack(const UcxLibrary& library, const UcxPacked& message) {
  Header header = {.magic = kMagic,
                   .kind = static_cast<uint32_t>(message.kind),
                   .major = library.major,
                   .minor = library.minor,
                   .content_bytes = static_cast<uint32_t>(message.content.size()),
                   .begin = message.begin,
                   .size = message.size,
                   .checksum = 0};
  header.checksum = Checksum(header, message.content);
  return std::string(reinterpret_cast<const char*>(&header), sizeof header) + message.content;
}

Status Unpack(const UcxLibrary& library, std::string_view bytes, UcxPacked::Kind kind,
              UcxPacked* message) {
  Header header = {};
  if (bytes.size() < sizeof header) {
    return InvalidArgument("jax_ep: a UCX ", Name(kind), " has ", bytes.size(),
                           " bytes; expected at least ", sizeof header);
  }
  std::memcpy(&header, bytes.data(), sizeof header);
  const std::string_view content = bytes.substr(sizeof header);
  if (header.magic != kMagic || header.content_bytes != content.size() ||
      header.checksum != Checksum(header, content)) {
    return InvalidArgument("jax_ep: ", bytes.size(), " bytes are no UCX ", Name(kind),
                           ", or are damaged; expected what jax_ep of the partner's process made");
  }
  if (header.kind != static_cast<uint32_t>(kind)) {
    return InvalidArgument("jax_ep: a UCX ", Name(static_cast<UcxPacked::Kind>(header.kind)),
                           " is given; expected a UCX ", Name(kind));
  }
  if (header.major != library.major || header.minor != library.minor) {
    return FailedPrecondition("jax_ep: the partner's process has UCX ", header.major, ".",
                              header.minor, ", and this one UCX ", library.version, " (",
                              library.path, "); install the same version on all hosts");
  }
  *message = {
      .kind = kind, .begin = header.begin, .size = header.size, .content = std::string(content)};
  return {};
}

}  // namespace jax_ep
