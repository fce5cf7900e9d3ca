// The scales of a quantized row, as words of 4 bytes. In flight a row's words follow its payload.
// Rows of operands and results are packed: if a row's scales are no multiple of 4 bytes, such as 90
// of one byte, the rows begin at any byte and the last word is partial, so bytes are copied.
#ifndef JAX_EP_DEVICE_TRANSFER_DISPATCH_SCALE_WORDS_CUH_
#define JAX_EP_DEVICE_TRANSFER_DISPATCH_SCALE_WORDS_CUH_

#include "ffi/device/protocol/peer_stores.cuh"

namespace jax_ep {

// The scales of a row that is read.
struct ScaleSource {
  const uint8_t* bytes;
  int num_bytes;

  __device__ int32_t Load(int word) const {
    if (num_bytes % 4 == 0) {
      return LoadGlobalNoAllocate(reinterpret_cast<const int32_t*>(bytes) + word);
    }
    uint32_t value = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 4 * word + i;
      if (at < num_bytes) value |= uint32_t{LoadGlobalNoAllocate(&bytes[at])} << 8 * i;
    }
    return static_cast<int32_t>(value);
  }
};

// The scales of a row that is written.
struct ScaleDestination {
  PeerPointer<uint8_t> bytes;
  int num_bytes;

  __device__ void Store(int word, int32_t value) const {
    if (num_bytes % 4 == 0) return StoreToPeer(bytes.As<int32_t>() + word, value);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 4 * word + i;
      if (at < num_bytes) StoreToPeer(bytes + at, static_cast<uint8_t>(value >> 8 * i));
    }
  }
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_DISPATCH_SCALE_WORDS_CUH_
