// Recording what the warps of a kernel do, and what they wait for.
//
// Without JAX_EP_PROFILE the classes do nothing, and kernels consist of the same instructions as
// without them. With it, kernels record while the host has set their module's profile_buffer.
#ifndef JAX_EP_DEVICE_PROFILE_RECORDER_CUH_
#define JAX_EP_DEVICE_PROFILE_RECORDER_CUH_

#include "ffi/device/profile/events.h"

#ifdef JAX_EP_PROFILE
#include "ffi/device/profile/clock.cuh"
#include "ffi/device/ptx/memory.cuh"
#include "ffi/device/ptx/shared_memory.cuh"
#ifndef __CUDACC_RTC__
#include "ffi/device/profile/recording_module.h"
#endif

namespace jax_ep {

// A variable, not a parameter: launches that CUDA graphs hold record, too.
__constant__ static ProfileBuffer* profile_buffer;
#ifndef __CUDACC_RTC__
static const RecordingModule recording_module(profile_buffer);
#endif

inline constexpr int kStaticRecorders = -1;

// A warp's position in the buffer, used by its first lane. It is in shared memory: registers are
// scarce.
class WarpRecorder {
 public:
  __device__ void Begin(ProfiledKernel kernel, uint32_t first_warps) {
    track_ = next_ = kOff;
    const ProfileBuffer* const buffer = profile_buffer;
    const uint32_t warp = threadIdx.x / 32;
    if (buffer == nullptr || ((first_warps >> warp & 1) == 0 && buffer->all_warps == 0)) return;
    track_ = next_ = Reserve();
    if (track_ == kFull) return;
    Store(track_, SpanKind::kPlace, static_cast<uint32_t>(kernel) | warp << 8 | SmIndex() << 16,
          blockIdx.x | gridDim.x << 16, GridIndex());
    StoreTime(track_ + 1, SpanKind::kBegin);
    next_ = track_ + kTrackRecords;
  }

  __device__ void Add(SpanKind kind, uint32_t start, uint32_t end, uint32_t waited) {
    if (next_ == kOff) return;
    if (next_ % kChunkRecords == 0) next_ = Reserve();
    if (next_ == kFull) {
      atomicAdd(&profile_buffer->num_lost, 1u);
    } else {
      Store(next_++, kind, start, end, waited);
    }
  }

  __device__ void BeginLoop() {
    loop_waited_ = 0;
    loop_start_ = ClockCycles();
  }
  __device__ void AddToLoop(uint32_t cycles) { loop_waited_ += cycles; }
  __device__ void EndLoop(SpanKind kind) { Add(kind, loop_start_, ClockCycles(), loop_waited_); }

  __device__ void End() {
    if (track_ < kFull) StoreTime(track_ + 2, SpanKind::kEnd);
  }

 private:
  static constexpr uint32_t kTrackRecords = 3;  // place, begin, end
  // Neither is a multiple of kChunkRecords.
  static constexpr uint32_t kOff = 0xffffffffu;   // the warp does not record
  static constexpr uint32_t kFull = 0xfffffffeu;  // the buffer is full

  // Returns the first record of a new chunk, or kFull.
  __device__ static uint32_t Reserve() {
    ProfileBuffer* const buffer = profile_buffer;
    const uint32_t first = atomicAdd(&buffer->num_reserved, kChunkRecords);
    if (first < buffer->capacity) return first;
    atomicAdd(&buffer->num_reserved, 0u - kChunkRecords);  // it must not wrap around
    return kFull;
  }

  __device__ void Store(uint32_t index, SpanKind kind, uint32_t first, uint32_t second,
                        uint32_t third) const {
    uint4* const records = reinterpret_cast<uint4*>(profile_buffer + 1);
    records[index] =
        make_uint4(static_cast<uint32_t>(kind) << kTrackBits | track_, first, second, third);
  }

  __device__ void StoreTime(uint32_t index, SpanKind kind) const {
    const uint64_t nanoseconds = GlobalTimer();
    Store(index, kind, ClockCycles(), static_cast<uint32_t>(nanoseconds),
          static_cast<uint32_t>(nanoseconds >> 32));
  }

  uint32_t track_;
  uint32_t next_;
  uint32_t loop_start_;
  uint32_t loop_waited_;
};

static_assert(sizeof(WarpRecorder) == kRecorderBytes);

// Returns the recorders of the block's warps: in static shared memory, or at an offset of its
// dynamic shared memory.
__device__ inline WarpRecorder* BlockRecorders(int shared_offset) {
  if (shared_offset != kStaticRecorders) {
    return reinterpret_cast<WarpRecorder*>(DynamicSharedMemory() + shared_offset);
  }
  __shared__ WarpRecorder recorders[32];
  return recorders;
}

// Calls use(recorder) in the warp's first lane.
template <typename Use>
__device__ inline void UseRecorder(int shared_offset, Use use) {
  const uint32_t thread = ReadThreadIndex();
  if (thread % 32 == 0) use(BlockRecorders(shared_offset)[thread / 32]);
}

// Constructed first in a kernel, by all threads. Bit w of first_warps: warp w is the first of a
// role.
class ProfileKernel {
 public:
  __device__ explicit ProfileKernel(ProfiledKernel kernel, uint32_t first_warps = 1,
                                    int recorders = kStaticRecorders)
      : recorders_(recorders) {
    UseRecorder(recorders, [&](WarpRecorder& recorder) { recorder.Begin(kernel, first_warps); });
  }
  ProfileKernel(const ProfileKernel&) = delete;
  __device__ ~ProfileKernel() {
    UseRecorder(recorders_, [](WarpRecorder& recorder) { recorder.End(); });
  }

 private:
  const int recorders_;
};

// Used by one warp. Records the time from its construction to the end of its scope.
class ProfileSpan {
 public:
  __device__ explicit ProfileSpan(SpanKind kind, int recorders = kStaticRecorders)
      : recorders_(recorders), kind_(kind), start_(ClockCycles()) {}
  ProfileSpan(const ProfileSpan&) = delete;
  __device__ ~ProfileSpan() {
    const uint32_t end = ClockCycles();
    UseRecorder(recorders_, [&](WarpRecorder& recorder) { recorder.Add(kind_, start_, end, 0); });
  }

 private:
  const int recorders_;
  const SpanKind kind_;
  const uint32_t start_;
};

// As ProfileSpan, for a loop. Its waits are too many for spans of their own: it adds them up. A
// warp has one at a time.
class ProfileLoop {
 public:
  __device__ ProfileLoop(SpanKind kind, int recorders) : recorders_(recorders), kind_(kind) {
    UseRecorder(recorders, [](WarpRecorder& recorder) { recorder.BeginLoop(); });
  }
  ProfileLoop(const ProfileLoop&) = delete;
  __device__ ~ProfileLoop() {
    UseRecorder(recorders_, [&](WarpRecorder& recorder) { recorder.EndLoop(kind_); });
  }

 private:
  const int recorders_;
  const SpanKind kind_;
};

// Adds the time from its construction to the end of its scope to the warp's ProfileLoop.
class ProfileWait {
 public:
  __device__ explicit ProfileWait(int recorders) : recorders_(recorders), start_(ClockCycles()) {}
  ProfileWait(const ProfileWait&) = delete;
  __device__ ~ProfileWait() {
    const uint32_t cycles = ClockCycles() - start_;
    UseRecorder(recorders_, [&](WarpRecorder& recorder) { recorder.AddToLoop(cycles); });
  }

 private:
  const int recorders_;
  const uint32_t start_;
};

}  // namespace jax_ep

#else

namespace jax_ep {

class ProfileKernel {
 public:
  __device__ explicit ProfileKernel(ProfiledKernel, uint32_t = 1, int = 0) {}
};

class ProfileSpan {
 public:
  __device__ explicit ProfileSpan(SpanKind, int = 0) {}
};

class ProfileLoop {
 public:
  __device__ ProfileLoop(SpanKind, int) {}
};

class ProfileWait {
 public:
  __device__ explicit ProfileWait(int) {}
};

}  // namespace jax_ep

#endif  // JAX_EP_PROFILE

#endif  // JAX_EP_DEVICE_PROFILE_RECORDER_CUH_
