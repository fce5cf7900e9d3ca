#include "ffi/runtime/network/nvshmem/nvshmem_network.h"

#include <charconv>
#include <chrono>
#include <cstring>
#include <thread>

namespace jax_ep {

Status NvshmemNetwork::Register(void* address, size_t bytes, std::string* key) {
  const NvshmemHeap& heap = *world_->heap();
  const auto begin = reinterpret_cast<uint64_t>(address);
  if (begin < heap.base() || begin + bytes > heap.base() + heap.bytes()) {
    return InvalidArgument("memory at ", address, " is not in NVSHMEM's heap");
  }
  const Heap own = {world_->id(), heap.base(), world_->pe()};
  key->assign(reinterpret_cast<const char*>(&own), sizeof own);
  return {};
}

Status NvshmemNetwork::Address(std::string* address) {
  *address = std::to_string(world_->pe());
  return {};
}

Status NvshmemNetwork::Connect(const std::string& address, int* connection) {
  const char* const end = address.data() + address.size();
  const auto [read, error] = std::from_chars(address.data(), end, *connection);
  if (error == std::errc() && read == end) return {};
  return InvalidArgument("\"", address, "\" is not the number of an NVSHMEM process");
}

Status NvshmemNetwork::Open(int connection, const std::string& key, int* memory) {
  Heap heap;
  if (key.size() != sizeof heap) {
    return InvalidArgument("an NVSHMEM key has ", key.size(), " bytes; expected ", sizeof heap);
  }
  std::memcpy(&heap, key.data(), sizeof heap);
  if (heap.world != world_->id() || heap.pe != connection) {
    return FailedPrecondition("the partner is not in the NVSHMEM world of this process");
  }
  *memory = next_memory_++;
  opened_[*memory] = heap;
  return {};
}

Network::Target NvshmemNetwork::TargetOf(int memory, uint64_t address) const {
  const Heap& heap = opened_.at(memory);
  return {address - heap.base + world_->heap()->base(), heap.pe};
}

uint64_t NvshmemNetwork::Map(int memory, uint64_t address) const {
  const Target target = TargetOf(memory, address);
  const auto* const symmetric = reinterpret_cast<const void*>(target.address);
  return reinterpret_cast<uint64_t>(world_->library().nvshmem_ptr(symmetric, target.process));
}

Status NvshmemNetwork::Start(const Put& put) {
  NvshmemPutParams params;
  params.from = reinterpret_cast<uint64_t>(put.from);
  params.bytes = put.bytes;
  params.value = put.value;
  params.to = TargetOf(put.memory, put.to).address;
  const Target flag = TargetOf(put.memory, put.flag);
  params.flag = flag.address;
  params.pe = flag.process;
  is_idle_ = false;
  return stream_.put(params);
}

Status NvshmemNetwork::Progress() { return is_idle_ ? Status{} : stream_.query(&is_idle_); }

Status NvshmemNetwork::Allocate(size_t bytes, void** address, bool* out_of_memory) {
  NvshmemHeap& heap = *world_->heap();
  const uint64_t allocated = heap.Allocate(bytes);
  *address = reinterpret_cast<void*>(allocated);
  if (allocated != 0) return {};
  *out_of_memory = true;
  return FailedPrecondition("NVSHMEM's heap of ", heap.bytes(), " bytes, of which ",
                            heap.used_bytes(), " are used, has no room for rings of ", bytes,
                            " bytes; set JAX_EP_NVSHMEM_HEAP_MB to more in all processes");
}

Status NvshmemNetwork::Flush(double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::duration<double>(seconds);
  is_idle_ = false;
  Status status = stream_.put({});
  while (status.ok() && !is_idle_) {
    status = stream_.query(&is_idle_);
    if (is_idle_ || !status.ok()) break;
    if (Clock::now() > deadline) {
      return FailedPrecondition("puts by NVSHMEM have not arrived within ", seconds, " s");
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  return status;
}

std::string NvshmemNetwork::Describe(int connection) const {
  const NvshmemLibrary& library = world_->library();
  const auto* const heap = reinterpret_cast<const void*>(world_->heap()->base());
  const bool is_mapped = library.nvshmem_ptr(heap, connection) != nullptr;
  return Concatenate("NVSHMEM ", library.version, " (", library.path, "), ",
                     is_mapped ? "NVLink or PCIe" : "a transport of NVSHMEM_REMOTE_TRANSPORT");
}

}  // namespace jax_ep
