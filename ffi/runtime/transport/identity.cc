#include "ffi/runtime/transport/identity.h"

#include <sys/random.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <mutex>

// Set by the build.
#ifndef JAX_EP_VERSION
#define JAX_EP_VERSION "unknown"
#endif

namespace jax_ep {
namespace {

template <size_t size>
void Copy(const std::string& text, char (&to)[size]) {
  std::strncpy(to, text.c_str(), size - 1);
}

std::string ReadBootId() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string text;
  std::getline(file, text);
  return text;
}

uint64_t RandomNumber() {
  uint64_t number = 0;
  while (number == 0) {
    if (getrandom(&number, sizeof number, 0) != sizeof number) number = 0;
  }
  return number;
}

}  // namespace

Identity ThisProcess() {
  Identity identity;
  Copy(JAX_EP_VERSION, identity.version);
  // A fork is another process.
  static std::mutex mutex;
  static pid_t pid = 0;
  static uint64_t process = 0;
  const std::lock_guard lock(mutex);
  if (pid != getpid()) {
    pid = getpid();
    process = RandomNumber();
  }
  identity.process = process;
  identity.pid = pid;
  Copy(ReadBootId(), identity.boot_id);
  static_cast<void>(gethostname(identity.host, sizeof identity.host - 1));
  return identity;
}

std::string Describe(const Identity& identity) {
  return Concatenate("process ", identity.index, " (pid ", identity.pid, " on ", identity.host,
                     ")");
}

Status CheckVersions(const std::vector<Identity>& identities) {
  const Identity& first = identities.front();
  for (const Identity& other : identities) {
    const bool is_known = other.magic == Identity::kMagic;
    if (is_known && other.size == first.size &&
        std::strncmp(other.version, first.version, sizeof first.version) == 0) {
      continue;
    }
    return FailedPrecondition(
        "jax_ep: the processes of the mesh have different versions of jax_ep: the device with "
        "logical id 0 has ",
        first.version, ", another one has ",
        is_known ? other.version : "one before several processes were supported",
        ". Install the same version everywhere");
  }
  return {};
}

}  // namespace jax_ep
