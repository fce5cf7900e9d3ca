// Reads back what warps record for jax_ep.profile.
#ifndef JAX_EP_TESTS_CPP_EMULATION_PROFILE_TRACKS_H_
#define JAX_EP_TESTS_CPP_EMULATION_PROFILE_TRACKS_H_

#include <map>
#include <utility>
#include <vector>

#include "ffi/device/profile/events.h"
#include "tests/cpp/unit/check.h"

namespace jax_ep::testing {

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

inline std::vector<Track> ReadTracks(const std::vector<ProfileRecord>& records) {
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

// Checks that spans are nested or apart.
inline void CheckSpans(const Track& track) {
  const uint32_t length = track.end_clock - track.begin_clock;
  uint32_t last_end = 0;
  for (size_t i = 0; i < track.spans.size(); ++i) {
    const Span& span = track.spans[i];
    CHECK(span.kind < SpanKind::kNumKinds);
    CHECK(span.start < span.end && span.end < length);
    CHECK(last_end < span.end);
    last_end = span.end;
    for (size_t j = 0; j < i; ++j) {
      const Span& before = track.spans[j];
      CHECK(before.end < span.start || span.start < before.start);
    }
  }
}

}  // namespace jax_ep::testing

#endif  // JAX_EP_TESTS_CPP_EMULATION_PROFILE_TRACKS_H_
