#include "ffi/runtime/network/ucx/library.h"

#include <dlfcn.h>

#include <mutex>

namespace jax_ep {
namespace {

constexpr const char* kName = "libucp.so.0";

// Puts into GPU memory by active messages, which Ethernet needs, came with the protocols of 1.16.
constexpr unsigned kMajor = 1, kOldestMinor = 17;

constexpr const char* kInstall =
    "install it by pip: libucx-cu13 (libucx-cu12 for CUDA 12), or for InfiniBand and RoCE a UCX "
    "of the system that is built with verbs";

// UCX finds its modules, such as the one for CUDA, in the folder "ucx" beside its libraries.
void* Open(const std::string& folder) {
  if (void* const opened = dlopen(kName, RTLD_NOW | RTLD_NOLOAD)) return opened;
  const std::string path = folder.empty() ? kName : Concatenate(folder, "/", kName);
  return dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
}

std::string PathOf(const void* function) {
  Dl_info info;
  return dladdr(function, &info) != 0 ? info.dli_fname : kName;
}

template <typename Function>
bool Find(void* handle, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(handle, name));
  return *function != nullptr;
}

Status Load(const std::string& folder, UcxLibrary* library) {
  void* const handle = Open(folder);
  if (handle == nullptr) {
    const char* const problem = dlerror();
    return FailedPrecondition(
        "jax_ep: UCX, which carries the network between hosts, is not found (",
        problem != nullptr ? problem : kName, "); ", kInstall);
  }
  if (!Find(handle, "ucp_get_version", &library->ucp_get_version)) {
    return FailedPrecondition("jax_ep: ", folder, "/", kName, " is not UCX; ", kInstall);
  }
  library->path = PathOf(reinterpret_cast<const void*>(library->ucp_get_version));
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
  if (!Find(handle, #name, &library->name)) missing = #name;
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
