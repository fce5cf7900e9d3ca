#include <cuda.h>

#include <iterator>

#include "ffi/runtime/driver.h"
#include "ffi/runtime/peer_access.h"

namespace jax_ep {
namespace {

struct Driver {
  decltype(&cuPointerGetAttribute) get_attribute = nullptr;
  decltype(&cuMemPoolGetAccess) get_pool_access = nullptr;
  decltype(&cuMemGetAccess) get_access = nullptr;
  bool is_whole = FindDriverFunction("cuPointerGetAttribute", 4000, &get_attribute).ok() &&
                  FindDriverFunction("cuMemPoolGetAccess", 11020, &get_pool_access).ok() &&
                  FindDriverFunction("cuMemGetAccess", 10020, &get_access).ok();

  template <typename T>
  bool Read(CUpointer_attribute attribute, uint64_t address, T* value) const {
    return get_attribute(value, attribute, CUdeviceptr{address}) == CUDA_SUCCESS;
  }
};

const Driver& TheDriver() {
  static const Driver driver;
  return driver;
}

}  // namespace

bool PeerAccess::CanRead(const void* pointer) {
  const auto address = reinterpret_cast<uint64_t>(pointer);
  const std::lock_guard lock(mutex_);
  auto next = readable_.upper_bound(address);
  if (next != readable_.begin() && address < std::prev(next)->second) return true;
  if (!TheDriver().is_whole || !Ask(address)) return false;
  CUdeviceptr begin = 0;
  size_t bytes = 0;
  if (TheDriver().Read(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address, &begin) &&
      TheDriver().Read(CU_POINTER_ATTRIBUTE_RANGE_SIZE, address, &bytes)) {
    readable_[begin] = begin + bytes;
  }
  return true;
}

bool PeerAccess::Ask(uint64_t address) const {
  const Driver& driver = TheDriver();
  CUmemoryPool pool = nullptr;
  if (!driver.Read(CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, address, &pool)) return false;
  // What cudaMalloc gives, and nothing else; it has no flags of its own.
  int is_plain = 0;
  if (!driver.Read(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, address, &is_plain)) {
    return false;
  }
  if (is_plain != 0) return true;
  for (const int device : devices_) {
    CUmemLocation location = {};
    location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    location.id = device;
    CUmemAccess_flags of_pool = CU_MEM_ACCESS_FLAGS_PROT_NONE;
    unsigned long long flags = 0;
    const CUresult asked = pool != nullptr
                               ? driver.get_pool_access(&of_pool, pool, &location)
                               : driver.get_access(&flags, &location, CUdeviceptr{address});
    if (asked != CUDA_SUCCESS) return false;
    if ((pool != nullptr ? static_cast<unsigned long long>(of_pool) : flags) ==
        CU_MEM_ACCESS_FLAGS_PROT_NONE) {
      return false;
    }
  }
  return true;
}

}  // namespace jax_ep
