// Threads, tiles and shared-memory shapes of the sm_90 matmul.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_SHAPES_H_
#define JAX_EP_DEVICE_MATMUL_SM90_SHAPES_H_

#include "ffi/device/common/integers.h"
#include "ffi/device/matmul/params.h"

namespace jax_ep::sm90 {

// A block has one warpgroup for the producer and scheduler warps, and two consumer warpgroups.
inline constexpr int kClusterBlocks = 2;
inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpgroupWarps = kWarpgroupThreads / 32;
inline constexpr int kConsumerWarpgroups = 2;
inline constexpr int kConsumerWarps = kConsumerWarpgroups * kWarpgroupWarps;
inline constexpr int kThreads = (1 + kConsumerWarpgroups) * kWarpgroupThreads;

// A block owns the registers that it is launched with. The producer's warpgroup gives most of its
// share to the consumers.
inline constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
inline constexpr int kProducerRegisters = 56;
inline constexpr int kConsumerRegisters = 224;
static_assert((kProducerRegisters + kConsumerWarpgroups * kConsumerRegisters) * kWarpgroupThreads <=
                  kThreads * kLaunchRegisters,
              "setmaxnreg.inc waits forever for registers that the block does not own");

// A block computes a tile of 128 x 256, each consumer warpgroup 64 x 256 of it.
inline constexpr int kTileM = 128;
inline constexpr int kTileN = 256;
inline constexpr int kTileK = 64;
inline constexpr int kWarpgroupM = kTileM / kConsumerWarpgroups;
inline constexpr int kWarpM = kWarpgroupM / kWarpgroupWarps;
inline constexpr int kHalfN = kTileN / 2;
static_assert(kWarpgroupM == 64 && kTileN == 256, "wgmma computes 64 x 256");

// Each thread of a consumer warpgroup has kAccumulators of them.
inline constexpr int kAccumulators = kWarpM * kTileN / 32;

inline constexpr int kMmaK = 16;  // k of one wgmma
static_assert(kTileK % kMmaK == 0, "a k-block consists of whole MMAs");

// A column block is 64 columns of a matrix as it is stored: 128 bytes, the width of the swizzle.
inline constexpr int kColumnBlock = 64;
inline constexpr int kSwizzleBytes = 128;
static_assert(kColumnBlock * 2 == kSwizzleBytes, "elements have 16 bits");
static_assert(kTileK == kColumnBlock, "an operand tile is made of 64 x 64 squares");

// A pipeline stage holds one k-block: a, then b, both as squares of 64 rows of one column block.
inline constexpr int kStages = 4;
inline constexpr int kSquareBytes = kTileK * kSwizzleBytes;
inline constexpr int kABytes = kTileM * kTileK * 2;
inline constexpr int kAHalfBytes = kABytes / kConsumerWarpgroups;  // one consumer warpgroup's rows
inline constexpr int kBBytes = kTileN * kTileK * 2;
inline constexpr int kBHalfBytes = kBBytes / 2;  // kHalfN columns
inline constexpr int kStageBytes = kABytes + kBBytes;
static_assert(kAHalfBytes == kSquareBytes, "a half of a is one box");
static_assert(kHalfN == 2 * kColumnBlock && kBHalfBytes == 2 * kSquareBytes,
              "a half of b is two squares, loaded as one box or as two");
static_assert(kStageBytes % 1024 == 0, "swizzle atoms begin at multiples of 1024 bytes");

// Each consumer warp stages its results for TMA stores in boxes of kWarpM rows of 128 bytes.
inline constexpr int kStagingBoxes = 2;
inline constexpr int kStagingBoxBytes = kWarpM * kSwizzleBytes;
inline constexpr int kWarpStagingBytes = kStagingBoxes * kStagingBoxBytes;

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_SHAPES_H_
