#include "ffi/runtime/groups/failure.h"

#include <atomic>
#include <string>
#include <string_view>

namespace jax_ep {
namespace {

const char* Name(Operation operation) {
  switch (operation) {
    case Operation::kDispatch:
      return "dispatch";
    case Operation::kRedispatch:
      return "redispatch";
    case Operation::kCombine:
      return "combine";
    case Operation::kBulkCopyCeiling:
      return "bulk_copy_ceiling";
  }
  return "?";
}

const char* Phase(const AbortRecord& record) {
  switch (record.outcome) {
    case Outcome::kMismatch:
      return "mismatch";
    case Outcome::kNoWorkspace:
      return "workspace";
    case Outcome::kConcurrent:
      return "concurrent";
    default:
      return record.wait_point == WaitPoint::kEntry ? "entry" : "progress";
  }
}

constexpr char kThen[] =
    ". Every later call of this generation returns NaN at once. Find out why, then call "
    "jax_ep.release() on every rank to start again.";

}  // namespace

bool IsPosted(const AbortRecord& record) {
  // Acquire: the device wrote the fields before it set the flag.
  return std::atomic_ref(const_cast<uint32_t&>(record.posted)).load(std::memory_order_acquire);
}

TimeoutReport ToReport(const AbortRecord& record) {
  return {record.rank, record.peer, Concatenate(Name(record.operation), ".", Phase(record)),
          static_cast<int64_t>(record.sequence % (uint64_t{1} << kGenerationShift))};
}

std::string DescribeWaiting(const AbortRecord& record, double seconds) {
  return Concatenate("jax_ep: rank ", record.rank, " has waited ", seconds, " s for rank ",
                     record.peer, " in ", ToReport(record).phase, " (sequence number ",
                     ToReport(record).sequence,
                     ") and goes on waiting. Is that rank still compiling, or did it fail?");
}

Status DescribeHostAbort(const std::string& reason) {
  return FailedPrecondition("jax_ep: the host has ended the calls of this generation: ", reason,
                            kThen);
}

std::string CauseOf(const std::string& message) {
  constexpr std::string_view kPrefix = "jax_ep: ";
  const size_t begin = message.starts_with(kPrefix) ? kPrefix.size() : 0;
  const size_t end = message.find(kThen);
  return message.substr(begin, end == std::string::npos ? end : end - begin);
}

Status Describe(const AbortRecord& record) {
  const TimeoutReport report = ToReport(record);
  switch (record.outcome) {
    case Outcome::kMismatch:
      return FailedPrecondition("jax_ep: rank ", report.rank, " runs ", Name(record.operation),
                                " (sequence number ", report.sequence, ") while rank ", report.peer,
                                " runs another call, or the same with other shapes", kThen);
    case Outcome::kNoWorkspace:
      return FailedPrecondition("jax_ep: rank ", report.rank, " has no workspace for ",
                                Name(record.operation), " (sequence number ", report.sequence,
                                "): it was released while calls were running", kThen);
    case Outcome::kConcurrent:
      return FailedPrecondition(
          "jax_ep: rank ", report.rank, " began ", Name(record.operation), " (sequence number ",
          report.sequence,
          ") while another call of the same ranks was running. The calls of a rank group must "
          "follow each other on every device: do not put them on streams of their own "
          "(compute_on), or into branches of a graph that run at the same time",
          kThen);
    default:
      return FailedPrecondition("jax_ep: rank ", report.rank, " waited for rank ", report.peer,
                                " in ", report.phase, " (sequence number ", report.sequence,
                                ") until the deadline", kThen);
  }
}

}  // namespace jax_ep
