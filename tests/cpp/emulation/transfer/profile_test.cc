// Tests what transfer kernels record for jax_ep.profile, while they run the random calls of
// tests/cpp/gpu/transfer/transfer_test.cu.
#include "ffi/runtime/profile/profile.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "ffi/kernels/transfer/params.h"
#include "ffi/runtime/profile/names.h"
#include "tests/cpp/emulation/transfer/register_kernels.h"

#define main main_of_transfer_test
#include "tests/cpp/gpu/transfer/transfer_test.cu"
#undef main
#undef CHECK
#include "tests/cpp/emulation/profile_tracks.h"
#include "tests/cpp/unit/check.h"

namespace jax_ep::testing {
namespace {

// Runs random calls of two ranks meanwhile, or of those of `options`, and checks their results.
DeviceProfile Record(int64_t max_records, bool all_warps,
                     const std::vector<const char*>& options = {"--ranks", "2"}) {
  CHECK_OK(StartProfile({0}, max_records, all_warps));
  CHECK_FAILS(StartProfile({0}, max_records, all_warps), "another profile is being recorded");
  std::vector<const char*> arguments = {"", "--tiny", "--only", "random", "--seconds", "1"};
  arguments.insert(arguments.end(), options.begin(), options.end());
  CHECK(main_of_transfer_test(static_cast<int>(arguments.size()),
                              const_cast<char**>(arguments.data())) == 0);
  std::vector<DeviceProfile> profiles;
  CHECK_OK(StopProfile(&profiles));
  CHECK(profiles.size() == 1);
  return profiles.front();
}

void CheckAllWarps(const DeviceProfile& profile, const std::set<ProfiledKernel>& expected_kernels,
                   const std::set<SpanKind>& expected_kinds) {
  CHECK(profile.num_lost == 0);
  std::map<std::pair<ProfiledKernel, uint32_t>, std::map<std::pair<uint32_t, uint32_t>, int>>
      counts;
  std::set<ProfiledKernel> kernels;
  std::set<SpanKind> kinds;
  for (const Track& track : ReadTracks(profile.records)) {
    CHECK(track.num_parts == 3);
    CHECK(track.kernel < ProfiledKernel::kNumKernels && track.block < track.blocks);
    CheckSpans(track);
    ++counts[{track.kernel, track.blocks}][{track.block, track.warp}];
    kernels.insert(track.kernel);
    for (const Span& span : track.spans) kinds.insert(span.kind);
  }
  // Every block of a grid has recorded as often as the others, with its first warp.
  for (const auto& [grid, by_warp] : counts) {
    for (uint32_t block = 0; block < grid.second; ++block) {
      CHECK(by_warp.contains({block, 0}) && by_warp.at({block, 0}) == by_warp.at({0, 0}));
    }
  }
  for (const ProfiledKernel kernel : expected_kernels) {
    if (!kernels.contains(kernel)) {
      Report(__FILE__, __LINE__, "recorded", kProfiledKernelNames[static_cast<int>(kernel)]);
    }
  }
  for (const SpanKind kind : expected_kinds) {
    if (!kinds.contains(kind)) {
      Report(__FILE__, __LINE__, "recorded", kSpanNames[static_cast<int>(kind)].name);
    }
  }
}

void TestAllWarps() {
  using enum ProfiledKernel;
  using enum SpanKind;
  CheckAllWarps(Record(int64_t{1} << 22, true),
                {kDispatch, kRedispatch, kCombine, kLowLatencyDispatch, kLowLatencyRedispatch,
                 kLowLatencyCombine},
                {kCountAssignments, kSendRoutes, kPlan, kInvertPlan, kSend, kExpand, kFill,
                 kSendSums, kReduce, kWaitClaim, kWaitEntry, kWaitItems, kWaitChunk, kWaitSegment,
                 kWaitRole, kWaitBlock});
}

void TestDomains() {
  using enum ProfiledKernel;
  using enum SpanKind;
  CheckAllWarps(Record(int64_t{1} << 22, true, {"--ranks", "4", "--domain-size", "2"}),
                {kHierarchicalDispatch, kHierarchicalRedispatch, kHierarchicalCombine},
                {kSendRoutes, kSend, kPackMessage, kForward, kExpand, kSendSums, kReduce, kWaitItem,
                 kWaitItemStores});
}

// Records the first warps of roles in a buffer that is too small.
void TestFullBuffer() {
  const DeviceProfile profile = Record(10 * kChunkRecords + 1, false);
  CHECK(profile.records.size() == 10 * kChunkRecords);
  CHECK(profile.num_lost > 0);
  const std::vector<Track> tracks = ReadTracks(profile.records);
  CHECK(!tracks.empty() && tracks.size() <= 10);
  for (const Track& track : tracks) {
    CHECK(track.num_parts == 3);
    CheckSpans(track);
    const bool sends =
        track.kernel == ProfiledKernel::kDispatch || track.kernel == ProfiledKernel::kRedispatch;
    const bool counts = track.kernel == ProfiledKernel::kLowLatencyDispatch;
    CHECK(track.warp == 0 || (sends && track.warp == kDispatchThreads / 32) ||
          (counts && track.warp == kLowLatencyThreads / 32 - kCountingWarps));
  }
}

void TestErrors() {
  emulation::faults.full_device = 0;
  CHECK_FAILS(StartProfile({0}, 1 << 20, false), "GPU 0: allocating 16777280 bytes for a profile");
  emulation::faults.full_device = -1;
  std::vector<DeviceProfile> profiles;
  CHECK_OK(StopProfile(&profiles));
  CHECK(profiles.empty());
}

}  // namespace
}  // namespace jax_ep::testing

int main() {
  using namespace jax_ep::testing;
  RegisterKernels();
  emulation::Register(reinterpret_cast<const void*>(harness::ReadArrivals), harness::ReadArrivals);
  TestErrors();
  TestAllWarps();
  TestDomains();
  TestFullBuffer();
  return Finish();
}
