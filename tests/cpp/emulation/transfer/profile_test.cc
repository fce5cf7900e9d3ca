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
#include "tests/cpp/unit/check.h"

namespace jax_ep::testing {
namespace {

struct Span {
  SpanKind kind;
  uint32_t start, end;  // since the track's begin
};

// The records of one warp in one launch.
struct Track {
  ProfiledKernel kernel;
  uint32_t warp, block, blocks;
  uint32_t begin_clock, end_clock;
  int num_parts = 0;        // kPlace, kBegin and kEnd
  std::vector<Span> spans;  // in the order of their ends
};

std::vector<Track> ReadTracks(const std::vector<ProfileRecord>& records) {
  std::map<uint32_t, Track> tracks;
  for (const bool reads_spans : {false, true}) {
    for (const ProfileRecord& record : records) {
      const auto kind = static_cast<SpanKind>(record.tag >> kTrackBits);
      Track& track = tracks[record.tag & (kMaxProfileRecords - 1)];
      const auto [first, second, third] = record.words;
      if (reads_spans && kind > SpanKind::kEnd) {
        track.spans.push_back({kind, first - track.begin_clock, second - track.begin_clock});
      }
      if (reads_spans || kind == SpanKind::kNone || kind > SpanKind::kEnd) continue;
      ++track.num_parts;
      if (kind == SpanKind::kBegin) track.begin_clock = first;
      if (kind == SpanKind::kEnd) track.end_clock = first;
      if (kind != SpanKind::kPlace) continue;
      track.kernel = static_cast<ProfiledKernel>(first & 0xff);
      track.warp = first >> 8 & 0xff;
      track.block = second & 0xffff;
      track.blocks = second >> 16;
    }
  }
  std::vector<Track> all;
  for (auto& [index, track] : tracks) {
    if (track.num_parts > 0) all.push_back(std::move(track));  // else the rest of a chunk
  }
  return all;
}

// Runs random calls meanwhile, and checks their results.
DeviceProfile Record(int64_t max_records, bool all_warps) {
  CHECK_OK(StartProfile({0}, max_records, all_warps));
  CHECK_FAILS(StartProfile({0}, max_records, all_warps), "another profile is being recorded");
  const char* arguments[] = {"", "--ranks", "2", "--tiny", "--only", "random", "--seconds", "1"};
  CHECK(main_of_transfer_test(std::size(arguments), const_cast<char**>(arguments)) == 0);
  std::vector<DeviceProfile> profiles;
  CHECK_OK(StopProfile(&profiles));
  CHECK(profiles.size() == 1);
  return profiles.front();
}

void CheckSpans(const Track& track) {
  const uint32_t length = track.end_clock - track.begin_clock;
  uint32_t last_end = 0;
  for (size_t i = 0; i < track.spans.size(); ++i) {
    const Span& span = track.spans[i];
    CHECK(span.kind < SpanKind::kNumKinds);
    CHECK(span.start < span.end && span.end < length);
    CHECK(last_end < span.end);
    last_end = span.end;
    for (size_t j = 0; j < i; ++j) {  // nested or apart
      const Span& before = track.spans[j];
      CHECK(before.end < span.start || span.start < before.start);
    }
  }
}

void TestAllWarps() {
  const DeviceProfile profile = Record(int64_t{1} << 22, true);
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
  using enum ProfiledKernel;
  for (const ProfiledKernel kernel : {kDispatch, kRedispatch, kCombine, kLowLatencyDispatch,
                                      kLowLatencyRedispatch, kLowLatencyCombine}) {
    if (!kernels.contains(kernel)) {
      Report(__FILE__, __LINE__, "recorded", kProfiledKernelNames[static_cast<int>(kernel)]);
    }
  }
  using enum SpanKind;
  for (const SpanKind kind : {kCountAssignments, kSendRoutes, kPlan, kInvertPlan, kSend, kExpand,
                              kFill, kSendSums, kReduce, kWaitClaim, kWaitEntry, kWaitItems,
                              kWaitChunk, kWaitSegment, kWaitRole, kWaitBlock}) {
    if (!kinds.contains(kind)) {
      Report(__FILE__, __LINE__, "recorded", kSpanNames[static_cast<int>(kind)].name);
    }
  }
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
  TestFullBuffer();
  return Finish();
}
