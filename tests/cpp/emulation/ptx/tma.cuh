// Replaces ffi/device/ptx/tma.cuh: copies run at some later time.
#ifndef JAX_EP_DEVICE_PTX_TMA_CUH_
#define JAX_EP_DEVICE_PTX_TMA_CUH_

#include "cuda.h"
#include "ffi/device/common/integers.h"
#include "ffi/device/ptx/tma_coordinates.cuh"
#include "tests/cpp/emulation/ptx/bulk_copy.cuh"
#include "tests/cpp/emulation/ptx/mbarrier.cuh"
#include "tests/cpp/emulation/ptx/shared_memory.cuh"

namespace jax_ep {

// A box of a tensor map, which is copied line by line: lines are contiguous in memory.
struct EmulatedBox {
  CUtensorMap map;
  TmaCoordinates at;

  EmulatedBox(const void* tensor_map, const TmaCoordinates& at)
      : map(*static_cast<const CUtensorMap*>(tensor_map)), at(at) {}

  int LineBytes() const { return map.box[0] * map.element_bytes; }
  int Bytes() const { return LineBytes() * map.box[1] * map.box[2]; }

  // Calls copy(address in memory, bytes inside of the tensor, offset in the box) for each line.
  template <typename Copy>
  void ForEachLine(const Copy& copy) const {
    for (int block = 0; block < map.box[2]; ++block) {
      for (int row = 0; row < map.box[1]; ++row) {
        const int64_t place[5] = {at.column, int64_t{at.row} + row, int64_t{at.block} + block,
                                  at.matrix, at.round};
        uint64_t address = map.base;  // may wrap around
        bool is_inside = true;
        for (int i = 0; i < 5; ++i) {
          address += static_cast<uint64_t>(place[i]) * map.strides[i];
          is_inside &= place[i] >= 0 && place[i] < static_cast<int64_t>(map.sizes[i]);
        }
        const int64_t left = static_cast<int64_t>(map.sizes[0]) - at.column;
        const int64_t elements = is_inside ? std::min<int64_t>(left, map.box[0]) : 0;
        copy(reinterpret_cast<uint8_t*>(address), static_cast<int>(elements) * map.element_bytes,
             (block * map.box[1] + row) * LineBytes());
      }
    }
  }

  // Returns where a vector of 16 bytes lies in shared memory. The swizzle exchanges the vectors of
  // a line by an XOR with higher bits of the address.
  uint32_t Swizzle(uint32_t address) const {
    return address ^ (address >> 7 & (map.swizzle_bytes / 16 - 1u)) << 4;
  }
};

inline constexpr int kEmulatedLineBytes = 1024;

inline void CheckTma(uint32_t address) {
  if (address % 128 != 0) emulation::Fail("a box of TMA is not aligned in shared memory");
}

// `shared`: the memory of the block that `to` is an address of.
inline void EmulatedLoad(const EmulatedBox& box, uint8_t* shared, uint32_t to, uint32_t barrier) {
  CheckTma(to);
  emulation::RunLater([=] {
    box.ForEachLine([&](const uint8_t* from, int inside, int offset) {
      uint8_t line[kEmulatedLineBytes] = {};
      std::memcpy(line, from, static_cast<size_t>(inside));
      for (int i = 0; i < box.LineBytes(); i += 16) {
        std::memcpy(shared + box.Swizzle(to + static_cast<uint32_t>(offset + i)), line + i, 16);
      }
    });
    reinterpret_cast<EmulatedBarrier*>(shared + barrier)->Complete(box.Bytes());
  });
}

inline void TmaLoad(uint32_t to, const void* tensor_map, uint32_t barrier,
                    const TmaCoordinates& at) {
  EmulatedLoad({tensor_map, at}, emulation::SharedMemory(), to, barrier);
}
inline void TmaLoadEvictFirst(uint32_t to, const void* tensor_map, uint32_t barrier,
                              const TmaCoordinates& at) {
  TmaLoad(to, tensor_map, barrier, at);
}
inline void TmaLoadMulticast(uint32_t to, const void* tensor_map, uint32_t barrier,
                             const TmaCoordinates& at, uint16_t blocks) {
  for (unsigned rank = 0; rank < 16; ++rank) {
    if ((blocks >> rank & 1) == 0) continue;
    EmulatedLoad({tensor_map, at}, emulation::SharedMemory(rank), to, barrier);
  }
}

// Calls store(to, from, bytes) for each line of a box, as part of this thread's next bulk group.
template <typename Store>
void EmulatedStore(const EmulatedBox& box, uint32_t from, const Store& store) {
  CheckTma(from);
  const uint8_t* const shared = emulation::SharedMemory();
  EmulatedStores::OfThread().open.push_back([=] {
    box.ForEachLine([&](uint8_t* to, int inside, int offset) {
      uint8_t line[kEmulatedLineBytes];
      for (int i = 0; i < box.LineBytes(); i += 16) {
        std::memcpy(line + i, shared + box.Swizzle(from + static_cast<uint32_t>(offset + i)), 16);
      }
      store(to, line, inside);
    });
  });
}
inline void TmaStore(const void* tensor_map, uint32_t from, const TmaCoordinates& at) {
  EmulatedStore({tensor_map, at}, from, [](uint8_t* to, const uint8_t* line, int bytes) {
    std::memcpy(to, line, static_cast<size_t>(bytes));
  });
}
inline void TmaReduceAdd(const void* tensor_map, uint32_t from, const TmaCoordinates& at) {
  EmulatedStore({tensor_map, at}, from, [](uint8_t* to, const uint8_t* line, int bytes) {
    for (int i = 0; i < bytes; i += 4) {
      float value;
      std::memcpy(&value, line + i, 4);
      std::atomic_ref<float>(*reinterpret_cast<float*>(to + i)).fetch_add(value);
    }
  });
}

inline void PrefetchTensorMap(const void*) {}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_TMA_CUH_
