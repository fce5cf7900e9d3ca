// The Python module jax_ep._ffi: handlers for XLA, and the runtime's functions for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ffi/device/common/limits.h"
#include "ffi/handlers/targets.h"
#include "ffi/kernels/probe.h"
#include "ffi/runtime/calls/workspace.h"
#include "ffi/runtime/groups/mailbox.h"
#include "ffi/runtime/network/nvshmem/nvshmem.h"
#include "ffi/runtime/network/ucx/ucx.h"
#include "ffi/runtime/profile/names.h"
#include "ffi/runtime/profile/profile.h"
#include "ffi/runtime/transport/local/mesh_processes.h"

// Set by the build: JAX_EP_VERSION, JAX_EP_COMPILER, and in builds with CUDA also
// JAX_EP_CUDA_VERSION and JAX_EP_CUDA_ARCHITECTURES (separated by ", ").
#ifndef JAX_EP_CUDA_VERSION
#define JAX_EP_CUDA_VERSION ""
#define JAX_EP_CUDA_ARCHITECTURES ""
#endif

namespace jax_ep {
namespace {

namespace nb = ::nanobind;
using namespace nb::literals;

nb::dict Registrations() {
  nb::dict registrations;
  for (const Target& target : Targets()) {
    nb::dict stages;
    stages["instantiate"] = nb::capsule(target.instantiate);
    stages["prepare"] = nb::capsule(target.prepare);
    stages["initialize"] = nb::capsule(target.initialize);
    stages["execute"] = nb::capsule(target.execute);
    registrations[target.name] = stages;
  }
  return registrations;
}

nb::dict TypeRegistrations() {
  nb::dict registrations;
  for (const StateType& type : StateTypes()) {
    nb::dict capsules;
    capsules["type_id"] = nb::capsule(type.type_id);
    capsules["type_info"] = nb::capsule(type.type_info);
    registrations[type.name] = capsules;
  }
  return registrations;
}

nb::dict BuildInfo() {
  const std::string cuda_version = JAX_EP_CUDA_VERSION;
  nb::list architectures;
  if (!cuda_version.empty()) {
    architectures = nb::list(nb::str(JAX_EP_CUDA_ARCHITECTURES).attr("split")(", "));
  }
  nb::dict info;
  info["version"] = JAX_EP_VERSION;
  info["cuda"] = !cuda_version.empty();
  info["cuda_version"] =
      cuda_version.empty() ? nb::none() : nb::object(nb::str(cuda_version.c_str()));
  info["cuda_architectures"] = architectures;
  info["compiler"] = JAX_EP_COMPILER;
  info["profile"] = RecordsProfiles();
  return info;
}

nb::dict Limits() {
  nb::dict limits;
  limits["num_ranks"] = kMaxRanks;
  limits["top_k"] = kMaxTopK;
  limits["num_experts"] = kMaxExperts;
  limits["items"] = kMaxItems;
  limits["vector_bytes"] = kVectorBytes;
  limits["eight_bit_capability"] = kEightBitCapability;
  return limits;
}

// With a domain size of 0, one NVLink domain has all ranks. A call that the kernels do not take
// needs no workspace.
nb::dict WorkspaceBuffers(int64_t num_tokens, int64_t hidden, int64_t top_k, int64_t num_experts,
                          int64_t num_ranks, int64_t row_bytes_per_element, int64_t domain_size) {
  if (row_bytes_per_element != 2 && row_bytes_per_element != 4) {
    throw nb::value_error("the dtype has another size; the kernels take bf16, f16 and f32");
  }
  WorkspaceLayout layout;
  const Status status =
      PlanWorkspace({.num_tokens = num_tokens,
                     .hidden = hidden,
                     .top_k = top_k,
                     .num_experts = num_experts,
                     .num_ranks = num_ranks,
                     .domain_size = domain_size,
                     .format = row_bytes_per_element == 2 ? kBFloat16Rows : kFloat32Rows},
                    &layout);
  nb::dict buffers;
  if (status.code == StatusCode::kUnimplemented) return buffers;
  if (!status.ok()) throw nb::value_error(status.message.c_str());
  for (const WorkspaceBuffer& buffer : layout.buffers) buffers[buffer.name] = buffer.bytes;
  if (domain_size != 0) buffers[layout.rails.name] = layout.rails.bytes;
  return buffers;
}

// Rows have `row_bytes`, those of their scales included.
std::string DomainsProblem(int64_t num_tokens, int64_t row_bytes, int64_t top_k,
                           int64_t num_experts, int64_t num_ranks, int64_t domain_size) {
  WorkspaceLayout layout;
  const Status status = PlanWorkspace({.num_tokens = num_tokens,
                                       .hidden = row_bytes,
                                       .top_k = top_k,
                                       .num_experts = num_experts,
                                       .num_ranks = num_ranks,
                                       .domain_size = domain_size,
                                       .format = {.payload = kF8E4M3}},  // a byte per element
                                      &layout);
  return status.message;
}

nb::list ProbeDevicesForPython() {
  std::vector<ProbedDevice> probed;
  {
    const nb::gil_scoped_release release;
    probed = ProbeDevices();
  }
  nb::list devices;
  for (const ProbedDevice& device : probed) {
    nb::dict fields;
    fields["ordinal"] = device.ordinal;
    fields["name"] = device.name;
    fields["compute_capability"] = device.compute_capability;
    fields["driver_version"] = device.driver_version;
    fields["architecture"] = device.architecture;
    fields["error"] = device.error;
    devices.append(fields);
  }
  return devices;
}

using ReportTuple = std::tuple<int64_t, int64_t, std::string, int64_t, std::string>;

std::vector<ReportTuple> TakeReports() {
  {
    const nb::gil_scoped_release release;
    PostReports();
  }
  std::vector<ReportTuple> reports;
  for (TimeoutReport& report : ProcessMailbox().Take()) {
    reports.emplace_back(report.rank, report.peer, std::move(report.phase), report.sequence,
                         std::move(report.message));
  }
  return reports;
}

bool PostReport(int64_t rank, int64_t peer, std::string phase, int64_t sequence_number,
                std::string message) {
  return ProcessMailbox().Post({rank, peer, std::move(phase), sequence_number, std::move(message)});
}

int64_t ReleaseForPython() {
  const nb::gil_scoped_release release;  // it waits for the devices
  return ReleaseWorkspaces();
}

void ShutdownForPython() {
  const nb::gil_scoped_release release;  // it waits for the devices
  Shutdown();
}

std::string UseUcxForPython(const std::string& folder) {
  const nb::gil_scoped_release release;  // it opens a library
  return UseUcx(folder).message;
}

std::string UseNvshmemForPython(const std::string& folder) {
  const nb::gil_scoped_release release;  // it opens a library
  return UseNvshmem(folder).message;
}

// The names are indexed by the numbers in records.
nb::dict ProfileNames() {
  nb::list kernels, spans, waits;
  for (const char* name : kProfiledKernelNames) kernels.append(name);
  for (const SpanName& span : kSpanNames) {
    spans.append(span.name);
    waits.append(span.waits_for == nullptr ? "" : span.waits_for);
  }
  nb::dict names;
  names["kernels"] = kernels;
  names["spans"] = spans;
  names["waits"] = waits;
  return names;
}

std::string StartProfileForPython(const std::vector<int>& ordinals, int64_t max_records,
                                  bool all_warps) {
  const nb::gil_scoped_release release;  // it waits for the devices
  return StartProfile(ordinals, max_records, all_warps).message;
}

nb::tuple StopProfileForPython() {
  std::vector<DeviceProfile> profiles;
  Status status;
  {
    const nb::gil_scoped_release release;  // it waits for the devices
    status = StopProfile(&profiles);
  }
  nb::list devices;
  for (const DeviceProfile& profile : profiles) {
    devices.append(nb::make_tuple(
        profile.ordinal,
        nb::bytes(profile.records.data(), profile.records.size() * sizeof(ProfileRecord)),
        profile.num_lost));
  }
  return nb::make_tuple(status.message, devices);
}

NB_MODULE(_ffi, module) {
  module.doc() = "The compiled half of jax_ep. Private: use the functions of jax_ep.";
  module.def("registrations", &Registrations,
             nb::sig("def registrations() -> dict[str, dict[str, typing.Any]]"),
             "Handler capsules by custom-call target and stage; empty in a build without CUDA.");
  module.def("type_registrations", &TypeRegistrations,
             nb::sig("def type_registrations() -> dict[str, typing.Any]"),
             "Capsules of the handlers' state types, to be registered before the targets.");
  module.def("build_info", &BuildInfo, nb::sig("def build_info() -> dict[str, typing.Any]"),
             "version, cuda, cuda_version or None, cuda_architectures, compiler, profile.");
  module.def("limits", &Limits, nb::sig("def limits() -> dict[str, int]"),
             "The kernels' limits. Rows are multiples of vector_bytes.");
  module.def("workspace_buffers", &WorkspaceBuffers, "num_tokens"_a, "hidden"_a, "top_k"_a,
             "num_experts"_a, "num_ranks"_a, "row_bytes_per_element"_a, "domain_size"_a,
             nb::sig("def workspace_buffers(num_tokens: int, hidden: int, top_k: int, "
                     "num_experts: int, num_ranks: int, row_bytes_per_element: int, "
                     "domain_size: int) -> dict[str, int]"),
             "Bytes of a rank's workspace by buffer. "
             "ValueError for sizes that make no sense.");
  module.def("domains_problem", &DomainsProblem, "num_tokens"_a, "row_bytes"_a, "top_k"_a,
             "num_experts"_a, "num_ranks"_a, "domain_size"_a,
             "Why the kernels do not take a call over NVLink domains, or an empty string.");
  module.def(
      "driver_problem", &DriverProblem,
      "Why the installed NVIDIA driver cannot run this build's kernels, or an empty string.");
  module.def("probe_devices", &ProbeDevicesForPython,
             nb::sig("def probe_devices() -> list[dict[str, typing.Any]]"),
             "Runs a small kernel on every GPU; see kernels/probe.h. Empty if there is none.");
  module.def(
      "use_ucx", &UseUcxForPython, "folder"_a,
      "Joins NVLink domains by UCX, before there are groups. Returns what is wrong, or \"\".");
  module.def("use_nvshmem", &UseNvshmemForPython, "folder"_a,
             "Joins NVLink domains by NVSHMEM, before there are groups. Returns what is wrong, or "
             "\"\".");
  module.def("profile_names", &ProfileNames, nb::sig("def profile_names() -> dict[str, list[str]]"),
             "kernels, spans, and the waits that spans add up, by the numbers in records.");
  module.def(
      "start_profile", &StartProfileForPython, "ordinals"_a, "max_records"_a, "all_warps"_a,
      "Begins to record on devices, after waiting for them. Returns what is wrong, or \"\".");
  module.def(
      "stop_profile", &StopProfileForPython,
      nb::sig("def stop_profile() -> tuple[str, list[tuple[int, bytes, int]]]"),
      "Ends. Returns what is wrong, or \"\", and devices' ordinals, records and lost spans.");
  module.def("take_reports", &TakeReports,
             "Takes the reports of failed calls: (rank, peer, phase, sequence_number, message).");
  module.def("post_report", &PostReport, "rank"_a, "peer"_a, "phase"_a, "sequence_number"_a,
             "message"_a = "", "Adds a report; returns False if the mailbox is full.");
  module.def("release_workspaces", &ReleaseForPython,
             "Frees the device workspaces of this process and returns their bytes.");
  module.def("forget_meshes", &ForgetMeshes, nb::call_guard<nb::gil_scoped_release>(),
             "Forgets the processes of all meshes, whose communicators have ended.");
  module.def("shutdown", &ShutdownForPython,
             "Ends calls that wait for a peer that will not come, and waits for the devices.");
}

}  // namespace
}  // namespace jax_ep
