#include "ffi/runtime/network/ucx/library.h"

#include <mutex>

#include "ffi/runtime/network/library.h"

namespace jax_ep {
namespace {

constexpr const char* kName = "libucp.so.0";

// Puts into GPU memory by active messages, which Ethernet needs, came with the protocols of 1.16.
constexpr unsigned kMajor = 1, kOldestMinor = 17;

constexpr const char* kInstall =
    "install it by pip: libucx-cu13 (libucx-cu12 for CUDA 12), or for InfiniBand and RoCE a UCX "
    "of the system that is built with verbs";

Status Load(const std::string& folder, UcxLibrary* library) {
  void* const handle = OpenLibrary(kName, folder);
  if (handle == nullptr) {
    const char* const problem = dlerror();
    return FailedPrecondition(
        "jax_ep: UCX, which carries the network between hosts, is not found (",
        problem != nullptr ? problem : kName, "); ", kInstall);
  }
  if (!FindFunction(handle, "ucp_get_version", &library->ucp_get_version)) {
    return FailedPrecondition("jax_ep: ", folder, "/", kName, " is not UCX; ", kInstall);
  }
  library->path = PathOfLibrary(library->ucp_get_version, kName);
  unsigned release = 0;
  library->ucp_get_version(&library->major, &library->minor, &release);
  library->version = Concatenate(library->major, ".", library->minor, ".", release);
  if (library->major != kMajor || library->minor < kOldestMinor) {
    return FailedPrecondition("jax_ep: UCX ", library->version, " (", library->path,
                              ") does not serve; expected ", kMajor, ".", kOldestMinor,
                              " or a newer ", kMajor, ".x; ", kInstall);
  }
  const char* missing = nullptr;
#define JAX_EP_FIND(name) \
  if (!FindFunction(handle, #name, &library->name)) missing = #name;
  JAX_EP_UCX_FUNCTIONS(JAX_EP_FIND)
#undef JAX_EP_FIND
  if (missing != nullptr) {
    return FailedPrecondition("jax_ep: UCX ", library->version, " (", library->path,
                              ") has no function ", missing, "; ", kInstall);
  }
  return {};
}

}  // namespace

Status OpenUcx(const std::string& folder, const UcxLibrary** library) {
  static std::mutex mutex;
  static UcxLibrary loaded;
  static bool is_loaded = false;
  const std::lock_guard lock(mutex);
  if (!is_loaded) {
    if (Status status = Load(folder, &loaded); !status.ok()) return status;
    is_loaded = true;
  }
  *library = &loaded;
  return {};
}

}  // namespace jax_ep
