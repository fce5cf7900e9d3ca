// Memory of the CUDA driver with descriptors that other processes import. A mapping outlives the
// process that has allocated the memory, so a kernel never stores to memory that is gone.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <fcntl.h>

#include <cstdint>
#include <mutex>
#include <vector>

#include "ffi/runtime/cuda/device_cuda.h"
#include "ffi/runtime/cuda/driver.h"
#include "ffi/runtime/transport/local/cuda_transport.h"

namespace jax_ep {
namespace {

struct Driver {
  decltype(&cuMemGetAllocationGranularity) granularity;
  decltype(&cuMemCreate) create;
  decltype(&cuMemRelease) release;
  decltype(&cuMemAddressReserve) reserve;
  decltype(&cuMemAddressFree) free_address;
  decltype(&cuMemMap) map;
  decltype(&cuMemUnmap) unmap;
  decltype(&cuMemSetAccess) set_access;
  decltype(&cuMemExportToShareableHandle) export_handle;
  decltype(&cuMemImportFromShareableHandle) import_handle;
  decltype(&cuGetErrorName) error_name;
  decltype(&cuDeviceGet) get_device;
  decltype(&cuDeviceGetAttribute) get_attribute;

  Status Find() {
    constexpr unsigned kVersion = 11000;
    Status status = FindDriverFunction("cuMemCreate", kVersion, &create);
    const auto find = [&](const char* name, auto* function) {
      if (status.ok()) status = FindDriverFunction(name, kVersion, function);
    };
    find("cuMemGetAllocationGranularity", &granularity);
    find("cuMemRelease", &release);
    find("cuMemAddressReserve", &reserve);
    find("cuMemAddressFree", &free_address);
    find("cuMemMap", &map);
    find("cuMemUnmap", &unmap);
    find("cuMemSetAccess", &set_access);
    find("cuMemExportToShareableHandle", &export_handle);
    find("cuMemImportFromShareableHandle", &import_handle);
    find("cuGetErrorName", &error_name);
    find("cuDeviceGet", &get_device);
    find("cuDeviceGetAttribute", &get_attribute);
    return status;
  }

  Status Check(CUresult result, const char* what) const {
    if (result == CUDA_SUCCESS) return {};
    const char* name = nullptr;
    if (error_name(result, &name) != CUDA_SUCCESS) name = "an unknown error";
    return FailedPrecondition(what, ": ", name);
  }
};

// Whether network cards can read and write such memory of a device.
bool HasGpuDirect(const Driver& driver, int device) {
  CUdevice handle = 0;
  int has = 0;
  return driver.get_device(&handle, device) == CUDA_SUCCESS &&
         driver.get_attribute(&has, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
                              handle) == CUDA_SUCCESS &&
         has != 0;
}

CUmemAllocationProp PropertiesOf(const Driver& driver, int device) {
  CUmemAllocationProp properties = {};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location = {};
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  // A network provider may register it. Otherwise the flag does nothing.
  properties.allocFlags.gpuDirectRDMACapable = HasGpuDirect(driver, device) ? 1 : 0;
  return properties;
}

class DriverMemory : public PeerMemory {
 public:
  const char* name() const override { return "cuMemCreate"; }

  Status Allocate(const std::vector<int>& devices, size_t bytes, Mapping* mapping,
                  bool* out_of_memory) override {
    Status status = FindOnce();
    if (status.ok()) status = RoundUp(devices[0], bytes, &mapping->bytes);
    if (!status.ok()) return status;
    const CUmemAllocationProp properties = PropertiesOf(driver_, devices[0]);
    CUmemGenericAllocationHandle handle = 0;
    const CUresult result = driver_.create(&handle, mapping->bytes, &properties, 0);
    *out_of_memory = result == CUDA_ERROR_OUT_OF_MEMORY;
    status = driver_.Check(result, "allocating a workspace (cuMemCreate)");
    if (!status.ok()) return status;
    mapping->handle = handle;
    return Map(devices, mapping);
  }

  Status Export(const Mapping& mapping, MemoryHandle* exported) override {
    int fd = -1;
    Status status = driver_.Check(
        driver_.export_handle(&fd, mapping.handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
        "exporting a workspace (cuMemExportToShareableHandle)");
    if (!status.ok()) return status;
    exported->descriptor = UniqueFd(fd);
    static_cast<void>(fcntl(fd, F_SETFD, FD_CLOEXEC));
    return {};
  }

  Status Import(const std::vector<int>& devices, const MemoryHandle& exported, size_t bytes,
                Mapping* mapping) override {
    Status status = FindOnce();
    if (status.ok()) status = RoundUp(devices[0], bytes, &mapping->bytes);
    if (!status.ok()) return status;
    CUmemGenericAllocationHandle handle = 0;
    const auto descriptor = static_cast<uintptr_t>(exported.descriptor.get());
    status = driver_.Check(driver_.import_handle(&handle, reinterpret_cast<void*>(descriptor),
                                                 CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
                           "importing its workspace (cuMemImportFromShareableHandle)");
    if (!status.ok()) return status;
    mapping->handle = handle;
    return Map(devices, mapping);
  }

  void Unmap(Mapping* mapping) override {
    if (mapping->address != nullptr) {
      const auto address = reinterpret_cast<CUdeviceptr>(mapping->address);
      static_cast<void>(driver_.unmap(address, mapping->bytes));
      static_cast<void>(driver_.free_address(address, mapping->bytes));
    }
    if (mapping->handle != 0) static_cast<void>(driver_.release(mapping->handle));
    *mapping = {};
  }

 private:
  Status FindOnce() {
    std::call_once(found_, [this] { found_status_ = driver_.Find(); });
    return found_status_;
  }

  Status RoundUp(int device, size_t bytes, size_t* rounded) const {
    const CUmemAllocationProp properties = PropertiesOf(driver_, device);
    size_t unit = 0;
    Status status =
        driver_.Check(driver_.granularity(&unit, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                      "the unit of memory (cuMemGetAllocationGranularity)");
    if (status.ok()) *rounded = (bytes + unit - 1) / unit * unit;
    return status;
  }

  Status Map(const std::vector<int>& devices, Mapping* mapping) const {
    CUdeviceptr address = 0;
    Status status = driver_.Check(driver_.reserve(&address, mapping->bytes, 0, 0, 0),
                                  "reserving addresses (cuMemAddressReserve)");
    if (!status.ok()) return status;
    status = driver_.Check(driver_.map(address, mapping->bytes, 0, mapping->handle, 0),
                           "mapping a workspace (cuMemMap)");
    if (!status.ok()) {
      static_cast<void>(driver_.free_address(address, mapping->bytes));
      return status;
    }
    mapping->address = reinterpret_cast<void*>(address);
    std::vector<CUmemAccessDesc> access;
    for (int device : devices) {
      access.push_back({{CU_MEM_LOCATION_TYPE_DEVICE, {}}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
      access.back().location.id = device;
    }
    return driver_.Check(
        driver_.set_access(address, mapping->bytes, access.data(), access.size()),
        "giving GPUs access to a workspace (cuMemSetAccess); nvidia-smi topo -p2p r shows which "
        "GPUs reach each other");
  }

  std::once_flag found_;
  Status found_status_;
  Driver driver_;
};

}  // namespace

PeerMemory* CudaDriverMemory() {
  static auto* const memory = new DriverMemory;
  return memory;
}

}  // namespace jax_ep
