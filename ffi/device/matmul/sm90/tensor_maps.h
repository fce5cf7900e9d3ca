// The tensor maps of the sm_90 matmul, and prefix maps, by which TMA stops where a group's rows
// end.
//
// TMA fills what lies outside of a tensor with zeros when it loads, and skips it when it stores.
// The tensor's sizes are part of the map, and the host encodes the map before group sizes are
// known. A prefix map moves the choice of the end into the kernel. It describes a matrix as a stack
// in which matrix e is the prefix of its first e rows. Rows that are copied from or to matrix e end
// at row e.
//
// A map gives all matrices of a stack the same number of rows. Prefixes are therefore counted from
// their end: row r of the matrix is row kPrefixRows - (e - r) of prefix e. Both coordinates have
// the stride of a row, so the address is too large by kPrefixRows rows. A fifth coordinate, always
// kPrefixRows, corrects it: its stride is 2^34 bytes minus a row, and kPrefixRows * 2^34 is 2^64,
// once around the address space.
//
// A base address kPrefixRows rows lower would not need that coordinate. But TMA reads the base even
// for a box that lies outside of the tensor as a whole, and faults if nothing is mapped there.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_TENSOR_MAPS_H_
#define JAX_EP_DEVICE_MATMUL_SM90_TENSOR_MAPS_H_

#ifdef __CUDACC_RTC__  // has no headers of the toolkit
struct alignas(64) CUtensorMap {
  unsigned long long opaque[16];
};
#else
#include <cuda.h>
#endif

#include "ffi/device/common/integers.h"
#include "ffi/device/common/limits.h"
#include "ffi/device/ptx/tma_coordinates.cuh"

namespace jax_ep {

// The last row of every prefix is number kPrefixRows - 1.
inline constexpr int kPrefixRows = 1 << 30;
static_assert(kPrefixRows >= kMaxItems, "a prefix may have all rows of a matrix");

// Prefix maps are marked (*). b is a stack of matrices, but a prefix map for kRhsGradient; then out
// is a stack of matrices.
struct MatmulTensorMaps {
  CUtensorMap a;         // (*)
  CUtensorMap b;         // [groups, k, n] or [groups, n, k]
  CUtensorMap a_narrow;  // (*) a and b in the boxes of narrow tiles
  CUtensorMap b_narrow;
  CUtensorMap out;                // (*)
  CUtensorMap pre_activation[2];  // (*) if it is kept: the gate columns, then the up columns
};

namespace sm90 {

// Returns the box that begins at `row` and `column` of the matrix and stops before row `end`; it is
// empty if `row` is not below `end`. In maps whose boxes have several column blocks, `column_block`
// is the first one's index and `column` is 0.
JAX_EP_HOST_DEVICE inline TmaCoordinates PrefixCoordinates(int end, int column, int row,
                                                           int column_block = 0) {
  return {column, kPrefixRows - (end - row), column_block, end, kPrefixRows};
}

}  // namespace sm90

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_MATMUL_SM90_TENSOR_MAPS_H_
