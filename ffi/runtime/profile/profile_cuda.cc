#include <cuda_runtime_api.h>

#include <algorithm>
#include <mutex>

#include "ffi/device/profile/recording_module.h"
#include "ffi/runtime/cuda/device_cuda.h"
#include "ffi/runtime/profile/profile.h"

namespace jax_ep {
namespace {

struct RecordingDevice {
  int ordinal;
  ProfileBuffer* buffer;  // on the device
};

std::mutex mutex;
std::vector<RecordingDevice> recording;

// Sets the variable of all modules on the current device, while no kernel runs there.
Status SetBuffer(ProfileBuffer* buffer) {
  for (const void* variable : RecordingModule::All()) {
    void* address = nullptr;
    cudaError_t error = cudaGetSymbolAddress(&address, variable);
    if (error == cudaSuccess) {
      error = cudaMemcpy(address, &buffer, sizeof buffer, cudaMemcpyHostToDevice);
    }
    if (error != cudaSuccess) return FromCuda(error, "setting the buffer of profiles");
  }
  return {};
}

Status StartOn(int ordinal, const ProfileBuffer& header, RecordingDevice* device) {
  const CurrentDevice current(ordinal);
  if (!current.status().ok()) return current.status();
  const size_t bytes = sizeof header + header.capacity * sizeof(ProfileRecord);
  void* memory = nullptr;
  cudaError_t error = cudaDeviceSynchronize();
  if (error == cudaSuccess) error = cudaMalloc(&memory, bytes);
  if (error != cudaSuccess) {
    return FromCuda(error, Concatenate("allocating ", bytes, " bytes for a profile").c_str());
  }
  *device = {ordinal, static_cast<ProfileBuffer*>(memory)};
  error = cudaMemset(memory, 0, bytes);
  if (error == cudaSuccess) {
    error = cudaMemcpy(memory, &header, sizeof header, cudaMemcpyHostToDevice);
  }
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  return error == cudaSuccess ? SetBuffer(device->buffer) : FromCuda(error, "starting a profile");
}

Status StopOn(const RecordingDevice& device, DeviceProfile* profile) {
  const CurrentDevice current(device.ordinal);
  if (!current.status().ok()) return current.status();
  Status status = FromCuda(cudaDeviceSynchronize(), "waiting for the kernels of a profile");
  if (status.ok()) status = SetBuffer(nullptr);
  if (!status.ok()) return status;  // a kernel may write to the buffer: it stays
  ProfileBuffer header;
  cudaError_t error = cudaMemcpy(&header, device.buffer, sizeof header, cudaMemcpyDeviceToHost);
  if (error == cudaSuccess) {
    profile->ordinal = device.ordinal;
    profile->num_lost = header.num_lost;
    profile->records.resize(std::min(header.num_reserved, header.capacity));
    error = cudaMemcpy(profile->records.data(), device.buffer + 1,
                       profile->records.size() * sizeof(ProfileRecord), cudaMemcpyDeviceToHost);
  }
  const cudaError_t freed = cudaFree(device.buffer);
  return FromCuda(error == cudaSuccess ? freed : error, "reading a profile");
}

// Called with the lock.
Status StopAll(std::vector<DeviceProfile>* profiles) {
  Status status;
  for (const RecordingDevice& device : recording) {
    DeviceProfile profile;
    const Status own = OnGpu(device.ordinal, StopOn(device, &profile));
    if (status.ok()) status = own;
    profiles->push_back(std::move(profile));
  }
  recording.clear();
  return status;
}

}  // namespace

bool RecordsProfiles() { return !RecordingModule::All().empty(); }

Status StartProfile(const std::vector<int>& ordinals, int64_t max_records, bool all_warps) {
  const std::lock_guard lock(mutex);
  if (!recording.empty()) return FailedPrecondition("another profile is being recorded");
  const int64_t capacity = std::clamp<int64_t>(max_records, kChunkRecords, kMaxProfileRecords);
  const ProfileBuffer header = {
      .capacity = static_cast<uint32_t>(capacity / kChunkRecords * kChunkRecords),
      .all_warps = all_warps,
      .num_reserved = 0,
      .num_lost = 0};
  for (const int ordinal : ordinals) {
    RecordingDevice device = {ordinal, nullptr};
    const Status status = OnGpu(ordinal, StartOn(ordinal, header, &device));
    if (device.buffer != nullptr) recording.push_back(device);
    if (status.ok()) continue;
    std::vector<DeviceProfile> discarded;
    static_cast<void>(StopAll(&discarded));
    return status;
  }
  return {};
}

Status StopProfile(std::vector<DeviceProfile>* profiles) {
  profiles->clear();
  const std::lock_guard lock(mutex);
  return StopAll(profiles);
}

}  // namespace jax_ep
