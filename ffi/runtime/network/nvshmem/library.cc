#include "ffi/runtime/network/nvshmem/library.h"

#include <mutex>

#include "ffi/runtime/network/library.h"

namespace jax_ep {
namespace {

constexpr const char* kName = "libnvshmem_host.so.3";

constexpr const char* kInstall =
    "install it: pip install nvidia-nvshmem-cu13 (nvidia-nvshmem-cu12 for CUDA 12)";

Status Load(const std::string& folder, NvshmemLibrary* library) {
  void* const handle = OpenLibrary(kName, folder);
  if (handle == nullptr) {
    const char* const problem = dlerror();
    return FailedPrecondition("jax_ep: NVSHMEM is not found (",
                              problem != nullptr ? problem : kName, "); ", kInstall);
  }
  const char* missing = nullptr;
#define JAX_EP_FIND(name, ...) \
  if (!FindFunction(handle, #name, &library->name)) missing = #name;
  JAX_EP_NVSHMEM_FUNCTIONS(JAX_EP_FIND)
#undef JAX_EP_FIND
  if (library->nvshmemx_vendor_get_version_info == nullptr) {
    return FailedPrecondition("jax_ep: ", folder.empty() ? "the system's" : folder + "/", kName,
                              " is not NVSHMEM 3; ", kInstall);
  }
  library->path = PathOfLibrary(library->nvshmemx_vendor_get_version_info, kName);
  int major = 0, minor = 0, patch = 0;
  library->nvshmemx_vendor_get_version_info(&major, &minor, &patch);
  library->version = Concatenate(major, ".", minor, ".", patch);
  if (major != kNvshmemMajor || minor < kNvshmemOldestMinor) {
    return FailedPrecondition("jax_ep: NVSHMEM ", library->version, " (", library->path,
                              ") does not serve; expected ", kNvshmemMajor, ".",
                              kNvshmemOldestMinor, " or a newer ", kNvshmemMajor, ".x; ", kInstall);
  }
  if (missing != nullptr) {
    return FailedPrecondition("jax_ep: NVSHMEM ", library->version, " (", library->path,
                              ") has no function ", missing, "; ", kInstall);
  }
  return {};
}

}  // namespace

Status OpenNvshmem(const std::string& folder, const NvshmemLibrary** library) {
  static std::mutex mutex;
  static NvshmemLibrary loaded;
  static bool is_loaded = false;
  const std::lock_guard lock(mutex);
  if (!is_loaded) {
    loaded = {};
    if (Status status = Load(folder, &loaded); !status.ok()) return status;
    is_loaded = true;
  }
  *library = &loaded;
  return {};
}

}  // namespace jax_ep
