// Runs CUDA C++ on a CPU: the transfer kernels, those that quantize, and matmuls. It shows what a
// kernel computes, but neither its speed nor errors of weak memory orders.
//
// A block, or a cluster of blocks, is an operating system thread, and its CUDA threads are fibers
// in it: `__shared__` is `thread_local`. Blocks, kernels of several ranks, asynchronous copies and
// matrix instructions run in any order that barriers and flags permit. This header comes before all
// others (-include). At its end it replaces the headers of ffi/device/ptx, by defining their
// guards.
#ifndef JAX_EP_TESTS_CPP_EMULATION_CUDA_EMULATOR_H_
#define JAX_EP_TESTS_CPP_EMULATION_CUDA_EMULATOR_H_

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <type_traits>

#define __CUDACC__ 1
#define __global__
#define __device__
#define __constant__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)
#define __noinline__
#define __forceinline__ inline
#define __trap() std::abort()
#define __shared__ static thread_local

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct int2 {
  int x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emulation {

// The running fiber's.
struct Place {
  dim3 thread, block, block_size, grid;
  unsigned rank;    // the block's in its cluster
  unsigned number;  // among the fibers of its cluster
};
inline constexpr unsigned kMaxFibers = 1024;
const Place& Here();

// Ends the program: a kernel does what a GPU does not permit.
[[noreturn]] void Fail(const std::string& what);

// Lets other fibers run.
void Yield();
// Lets other fibers run until all fibers of all blocks that run have had two turns.
void AwaitTurns();
// The fiber's clock in nanoseconds. It goes on as it is read, so that a rank that has not got a CPU
// is not taken for a dead one. Once it steps back, as a GPU's timer may.
uint64_t Clock();
// Lets other fibers run until one of them has changed *word from `value`.
void AwaitChange(const uint64_t* word, uint64_t value);

bool BarrierOfBlock(bool value = false);  // whether any thread passed true
void BarrierOfSome(int number, unsigned threads);
// The values of all 32 lanes, until the warp's next exchange but one.
const uint64_t* Exchange(uint64_t value);

// The barrier of all threads of the cluster, in two steps.
void ArriveAtCluster();
void WaitForCluster();

uint8_t* SharedMemory();               // the block's dynamic shared memory
uint8_t* SharedMemory(unsigned rank);  // the same of a block of the cluster

uint64_t Random();  // a number of the cluster's sequence

// Runs an asynchronous copy at some later time, on the cluster's thread.
void RunLater(std::function<void()> copy);

template <typename T>
uint64_t ToWord(T value) {
  static_assert(sizeof(T) <= 8);
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof value);
  return word;
}
template <typename T>
T FromWord(uint64_t word) {
  T value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

struct Grid {
  unsigned blocks;
  unsigned threads;  // per block
  size_t shared_bytes;
  std::function<void()> kernel;
  unsigned cluster_blocks = 1;
};
// Runs clusters of blocks, some of them at the same time, until all have ended. Each block takes an
// SM of the device: a cluster waits until there are some that no other kernel's blocks have.
void RunGrid(int device, const Grid& grid);

// The blocks that have an SM of the device.
unsigned ResidentBlocks(int device);

struct Settings {
  int major = 9;                 // compute capability, by RegisterKernels
  unsigned num_sms = 4;          // SMs per device
  unsigned resident_blocks = 3;  // blocks of a kernel that run at the same time
  int shared_bytes = 8 * 1024;   // shared memory of a block: so little that pipelines are short
  uint64_t seed = 1;             // determines the orders
};
extern Settings settings;

// Called by kernels where another thread may come in between. Set while no kernel runs.
struct Hooks {
  std::function<void(const uint64_t* address)> after_swap;  // CompareAndSwapDevice calls it
  std::function<void()> before_long_sleep;                  // AwaitTurns follows
};
extern Hooks hooks;

}  // namespace emulation

// The running fiber's place.
inline thread_local constinit dim3 threadIdx, blockIdx, blockDim, gridDim;

inline void __syncthreads() { ::emulation::BarrierOfBlock(); }
inline int __syncthreads_or(int value) { return ::emulation::BarrierOfBlock(value != 0); }
inline void __syncwarp() { ::emulation::Exchange(0); }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __nanosleep(unsigned nanoseconds) {
  // A GPU's blocks that have begun before a long sleep have passed their first lines after it.
  if (nanoseconds < 10'000) return ::emulation::Yield();
  if (::emulation::hooks.before_long_sleep) ::emulation::hooks.before_long_sleep();
  ::emulation::AwaitTurns();
}

template <typename T>
T __shfl_sync(unsigned, T value, int lane, int width = 32) {
  const uint64_t* const all = ::emulation::Exchange(::emulation::ToWord(value));
  return ::emulation::FromWord<T>(all[threadIdx.x % 32 / width * width + lane % width]);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int distance) {
  const int lane = threadIdx.x % 32;
  const uint64_t* const all = ::emulation::Exchange(::emulation::ToWord(value));
  return ::emulation::FromWord<T>(all[lane < distance ? lane : lane - distance]);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int lanes) {
  const int lane = threadIdx.x % 32;
  return ::emulation::FromWord<T>(::emulation::Exchange(::emulation::ToWord(value))[lane ^ lanes]);
}
inline unsigned __ballot_sync(unsigned, bool value) {
  const uint64_t* const all = ::emulation::Exchange(value);
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= (all[lane] != 0 ? 1u : 0u) << lane;
  return bits;
}
inline bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }
template <typename T>
unsigned __match_any_sync(unsigned, T value) {
  const uint64_t mine = ::emulation::ToWord(value);
  const uint64_t* const all = ::emulation::Exchange(mine);
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= (all[lane] == mine ? 1u : 0u) << lane;
  return bits;
}
inline unsigned __reduce_min_sync(unsigned, unsigned value) {
  const uint64_t* const all = ::emulation::Exchange(value);
  return static_cast<unsigned>(*std::min_element(all, all + 32));
}
inline unsigned __reduce_add_sync(unsigned, unsigned value) {
  const uint64_t* const all = ::emulation::Exchange(value);
  unsigned sum = 0;
  for (int lane = 0; lane < 32; ++lane) sum += static_cast<unsigned>(all[lane]);
  return sum;
}
inline unsigned __reduce_or_sync(unsigned, unsigned value) {
  const uint64_t* const all = ::emulation::Exchange(value);
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= static_cast<unsigned>(all[lane]);
  return bits;
}

inline int __popc(unsigned bits) { return std::popcount(bits); }
inline int __popcll(unsigned long long bits) { return std::popcount(bits); }
inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }
inline int __ffsll(unsigned long long bits) {
  return __builtin_ffsll(static_cast<long long>(bits));
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  }
  return result;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned bits) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (bits & 31));
}
inline int __clz(unsigned bits) { return std::countl_zero(bits); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __frcp_rn(float a) { return 1 / a; }

template <typename T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  return std::atomic_ref<T>(*address).fetch_add(value);
}
template <typename T>
T atomicExch(T* address, T value) {
  return std::atomic_ref<T>(*address).exchange(value);
}
template <typename T>
T atomicCAS(T* address, T expected, T value) {
  std::atomic_ref<T>(*address).compare_exchange_strong(expected, value);
  return expected;
}

template <typename T>
T __ldg(const T* address) {
  return *address;
}

template <typename A, typename B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  return b < a ? b : a;
}
template <typename A, typename B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  return a < b ? b : a;
}

#include "tests/cpp/emulation/ptx/barrier.cuh"
#include "tests/cpp/emulation/ptx/bulk_copy.cuh"
#include "tests/cpp/emulation/ptx/clock.cuh"
#include "tests/cpp/emulation/ptx/cluster.cuh"
#include "tests/cpp/emulation/ptx/cp_async.cuh"
#include "tests/cpp/emulation/ptx/element_types.cuh"
#include "tests/cpp/emulation/ptx/math.cuh"
#include "tests/cpp/emulation/ptx/mbarrier.cuh"
#include "tests/cpp/emulation/ptx/memory.cuh"
#include "tests/cpp/emulation/ptx/mma.cuh"
#include "tests/cpp/emulation/ptx/shared_memory.cuh"
#include "tests/cpp/emulation/ptx/tma.cuh"
#include "tests/cpp/emulation/ptx/wgmma.cuh"
#include "tests/cpp/emulation/ptx/wgmma_columns.cuh"
#include "tests/cpp/emulation/ptx/wgmma_fp8.cuh"
#include "tests/cpp/emulation/ptx/wgmma_registers.cuh"

#endif  // JAX_EP_TESTS_CPP_EMULATION_CUDA_EMULATOR_H_
