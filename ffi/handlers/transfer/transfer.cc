#include "ffi/handlers/transfer/transfer.h"

#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "ffi/handlers/transfer/collectives.h"
#include "ffi/runtime/calls/in_flight.h"
#include "ffi/runtime/cuda/device_cuda.h"
#include "ffi/runtime/cuda/nccl.h"
#include "ffi/runtime/settings.h"
#include "ffi/runtime/transport/transport.h"

namespace jax_ep {
namespace {

// XLA's own communicator over the whole mesh, the one that a psum over all its axes uses: another
// would cost some 200 MiB of every GPU. A device's rank in it is its logical id. Processes exchange
// their identities over it, once; rows never go that way.
constexpr int64_t kCommunicationId = 0;

std::vector<std::vector<int64_t>> WholeMesh(const CallSite& site) {
  std::vector<int64_t> ids(site.num_devices());
  std::iota(ids.begin(), ids.end(), 0);
  return {ids};
}

// Runs once per execution and device, before any device launches. A call site needs the
// communicator at its first run only. All devices of a run get the same answer of HasRank. XLA's
// devices of this process meet when it acquires the communicator, so all are announced by then.
ffi::Error Prepare(TransferState* state, int32_t device, ffi::RunId run,
                   Communicator communicator) {
  if (state->site.num_devices() == 1 || state->site.HasRank(device)) return ffi::Error::Success();
  state->site.Announce(run.run_id);
  return communicator.RequestCommunicator(ffi::GroupMode::kFlattenedId, WholeMesh(state->site),
                                          kCommunicationId);
}

// Finds the communicator of the mesh, and the device's logical id there.
Status FindCommunicator(const CallSite& site, Communicator& communicator,
                        CallSite::Arrival* arrival) {
  if (site.num_devices() == 1) return {};
  auto lent =
      communicator.GetCommunicator(ffi::GroupMode::kFlattenedId, WholeMesh(site), kCommunicationId);
  if (lent.has_error()) {
    return FailedPrecondition("jax_ep: XLA lends no communicator of the mesh: ",
                              lent.error().message());
  }
  arrival->communicator = *lent;
  return RankIn(*lent, &arrival->logical_id);
}

// Describes a call, so that processes can compare theirs.
std::string Describe(const TransferState& state, const TransferCall& call) {
  const TransferShape& shape = call.shape;
  const std::string domains =
      shape.has_domains() ? Concatenate(", NVLink domains of ", shape.domain_size) : "";
  return Concatenate(state.stages.target, " of ", shape.num_tokens, " tokens with hidden ",
                     shape.hidden, ", top_k ", shape.top_k, ", ", shape.num_experts, " experts, ",
                     shape.num_rows, " rows, row_align ", call.row_align, ", zero_tail ",
                     call.zero_tail, ", weights ", call.has_weights, ", scalars ", call.has_scalars,
                     shape.num_scales() > 0 ? ", quantized" : "", domains,
                     call.allow_low_latency ? "" : ", general kernels only");
}

// Makes the prepared call of a device.
Status PrepareCall(const TransferState& state, int32_t device, const ffi::RemainingArgs& operands,
                   const ffi::RemainingRets& results, PreparedTransfer* prepared,
                   std::string* description) {
  const TransferConfig& config = state.config;
  TransferCall call = {.call_site = state.site.id(device),
                       .shape = {},
                       .num_sms = config.num_sms,
                       .num_lanes = config.num_lanes,
                       .row_align = config.row_align,
                       .zero_tail = config.zero_tail,
                       .has_weights = config.has_weights,
                       .has_scalars = config.has_scalars,
                       .repeats = config.repeats,
                       .allow_low_latency = !LowLatencyIsDisabled()};
  const CurrentDevice current(device);
  Status status = current.status();
  if (status.ok()) {
    status = CheckCallBuffers(state.stages.check, config, operands, results, &call.shape);
  }
  if (status.ok()) status = state.stages.prepare(call, prepared);
  if (status.ok()) *description = Describe(state, call);
  return status;
}

int64_t WorkspaceBytes(const PreparedTransfer& prepared) {
  return std::visit(
      [](const auto& of) { return static_cast<int64_t>(CallOf(of.params).workspace_bytes); },
      prepared);
}

// Initializes the first run of a device. An error goes through Enter, so that it fails the other
// devices, too.
Status InitializeFirst(TransferState* state, CallSite::Arrival arrival, int64_t run,
                       Communicator& communicator, const ffi::RemainingArgs& operands,
                       const ffi::RemainingRets& results) {
  const int32_t device = arrival.device;
  auto prepared = std::make_unique<PreparedTransfer>();
  arrival.status = PrepareCall(*state, device, operands, results, prepared.get(), &arrival.call);
  if (arrival.status.ok()) {
    arrival.workspace_bytes = WorkspaceBytes(*prepared);
    if (!state->site.HasRank(device)) {
      arrival.status = FindCommunicator(state->site, communicator, &arrival);
    }
  }
  const uint64_t id = state->site.id(device);
  Status status = state->site.Enter(run, arrival);
  // The processes of the group have agreed on another id.
  if (status.ok() && state->site.id(device) != id) {
    status = PrepareCall(*state, device, operands, results, prepared.get(), &arrival.call);
  }
  if (status.ok()) state->prepared.Set(device, std::move(prepared));
  return status;
}

// Runs after all communicators were acquired, before XLA's rendezvous and the launches.
ffi::Error Initialize(TransferState* state, cudaStream_t stream, int32_t device, ffi::RunId run,
                      Communicator communicator, ffi::RemainingArgs operands,
                      ffi::RemainingRets results) {
  CallSite::Arrival arrival = {.device = device, .stream = stream};
  if (state->stages.is_start) {
    const CurrentDevice current(device);
    arrival.status = current.status();
    if (arrival.status.ok()) {
      arrival.status =
          InFlightCalls::OfProcess().FindStream(device, state->config.lane, &arrival.stream);
    }
  }
  const PreparedTransfer* const prepared = state->prepared.Find(device);
  if (prepared == nullptr) {
    return ToError(InitializeFirst(state, arrival, run.run_id, communicator, operands, results));
  }
  arrival.workspace_bytes = WorkspaceBytes(*prepared);
  return ToError(state->site.Enter(run.run_id, arrival));
}

XLA_FFI_DEFINE_HANDLER(kPrepare, Prepare,
                       ffi::Ffi::BindPrepare()
                           .Ctx<ffi::State<TransferState>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Ctx<ffi::RunId>()
                           .Ctx<ffi::Extension<Collectives>>());

XLA_FFI_DEFINE_HANDLER(kInitialize, Initialize,
                       ffi::Ffi::BindInitialize()
                           .Ctx<ffi::State<TransferState>>()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Ctx<ffi::RunId>()
                           .Ctx<ffi::Extension<Collectives>>()
                           .RemainingArgs()
                           .RemainingRets());

}  // namespace

ffi::TypeId TransferState::id = {};

TransferState::TransferState(const TransferStages& stages, TransferConfig config)
    : stages(stages),
      config(std::move(config)),
      site(this->config.Groups(), this->config.lane, {LoadAllKernels, LaunchStartGeneration},
           CudaTransport(), this->config.domain_size) {}

ffi::ErrorOr<std::unique_ptr<TransferState>> InstantiateTransfer(
    const TransferStages& stages, const ffi::Dictionary& attributes,
    const ffi::RemainingArgs& operands, const ffi::RemainingRets& results) {
  TransferConfig config;
  const Status status = CheckInstantiate(stages, attributes, operands, results, &config);
  if (!status.ok()) return ToError(status);
  return std::make_unique<TransferState>(stages, std::move(config));
}

void DecodeTransfer(AttributeReader& reader, TransferConfig* config) {
  reader.Read("replica_groups", &config->replica_groups);
  reader.Read("group_size", &config->group_size);
  reader.Read("num_sms", &config->num_sms);
  reader.ReadOptional("lane", &config->lane);
  reader.ReadOptional("num_lanes", &config->num_lanes);
}

void DecodePlanned(AttributeReader& reader, TransferConfig* config) {
  DecodeTransfer(reader, config);
  reader.Read("num_experts", &config->num_experts);
  reader.Read("row_align", &config->row_align);
  reader.Read("zero_tail", &config->zero_tail);
  reader.Read("has_weights", &config->has_weights);
  reader.ReadOptional("domain_size", &config->domain_size);
}

Handlers TransferHandlers(const char* target, XLA_FFI_Handler* instantiate,
                          XLA_FFI_Handler* execute) {
  return {.target = {target, Address(instantiate), Address(kPrepare), Address(kInitialize),
                     Address(execute)},
          .state = MakeStateType<TransferState>("jax_ep.TransferState.v1"),
          .load_kernels = LoadTransferKernels,
          .communicates = true};
}

Status FindPrepared(const TransferState& state, int32_t device, const PreparedTransfer** prepared,
                    ControlBlock** control) {
  *prepared = state.prepared.Find(device);
  *control = state.site.control(device);
  if (*prepared != nullptr && *control != nullptr) return {};
  return FailedPrecondition(state.stages.target, ": GPU ", device,
                            " executes a call that it has not initialized");
}

Status FindLaunchStream(const TransferState& state, int32_t device, cudaStream_t stream,
                        cudaStream_t* launch_stream) {
  *launch_stream = stream;
  if (!state.stages.is_start) return {};
  return InFlightCalls::OfProcess().Fork(device, state.config.lane, stream, launch_stream);
}

Status AddInFlight(const TransferState& state, int32_t device, cudaStream_t launch_stream,
                   const ffi::RemainingArgs& operands, const ffi::RemainingRets& results) {
  if (!state.stages.is_start) return {};
  return InFlightCalls::OfProcess().Add(device, launch_stream,
                                        ResultsAndOperands(operands, results));
}

ffi::Error Launched(const TransferState& state, int32_t device, const Status& status) {
  if (!status.ok()) state.site.Abort(device, status.message);
  return ToError(status);
}

PlanOperands NextPlanOperands(Addresses<ffi::RemainingArgs>& operands) {
  PlanOperands plan;
  operands.Skip(2);  // group_sizes, real_group_sizes
  plan.row_offsets = operands.Next<const int32_t>();
  plan.row_source = operands.Next<const int32_t>();
  plan.partial_sum_index = operands.Next<const int32_t>();
  operands.Skip(1);  // kept
  plan.destination = operands.Next<const int32_t>();
  operands.Skip(3);  // num_received, num_dropped, num_bad_ids
  plan.status = operands.Next<const int32_t>();
  return plan;
}

PlanResults NextPlanResults(Addresses<ffi::RemainingRets>& results) {
  PlanResults plan;
  plan.group_sizes = results.Next<int32_t>();
  plan.real_group_sizes = results.Next<int32_t>();
  plan.row_offsets = results.Next<int32_t>();
  plan.row_source = results.Next<int32_t>();
  plan.partial_sum_index = results.Next<int32_t>();
  plan.kept = results.Next<bool>();
  plan.destination = results.Next<int32_t>();
  plan.num_received = results.Next<int32_t>();
  plan.num_dropped = results.Next<int32_t>();
  plan.num_bad_ids = results.Next<int32_t>();
  plan.status = results.Next<int32_t>();
  return plan;
}

ForwardingOperands NextForwardingOperands(const TransferConfig& config,
                                          Addresses<ffi::RemainingArgs>& operands) {
  ForwardingOperands forwarding = {};
  if (config.domain_size == 0) return forwarding;
  forwarding.token_ranks = operands.Next<const uint32_t>();
  forwarding.partial_sum_index = operands.Next<const int32_t>();
  return forwarding;
}

ForwardingResults NextForwardingResults(const TransferConfig& config,
                                        Addresses<ffi::RemainingRets>& results) {
  ForwardingResults forwarding = {};
  if (config.domain_size == 0) return forwarding;
  forwarding.token_ranks = results.Next<uint32_t>();
  forwarding.partial_sum_index = results.Next<int32_t>();
  return forwarding;
}

}  // namespace jax_ep
