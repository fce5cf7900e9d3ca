#include "ffi/handlers/transfer.h"

#include <numeric>
#include <utility>
#include <variant>
#include <vector>

#include "ffi/handlers/collectives.h"
#include "ffi/runtime/device_cuda.h"
#include "ffi/runtime/nccl.h"
#include "ffi/runtime/settings.h"

namespace jax_ep {
namespace {

// XLA's own communicator over the whole mesh, the one that a psum over all its axes uses: another
// would cost some 200 MiB of every GPU. It is used for one thing: a device's rank in it is its
// logical id.
constexpr int64_t kCommunicationId = 0;

std::vector<std::vector<int64_t>> WholeMesh(const CallSite& site) {
  std::vector<int64_t> ids(site.num_devices());
  std::iota(ids.begin(), ids.end(), 0);
  return {ids};
}

// Runs once per execution and device, before any device launches. A call site needs the
// communicator at its first run only. All devices of a run get the same answer of HasRank.
ffi::Error Prepare(TransferState* state, int32_t device, Communicator communicator) {
  if (state->site.num_devices() == 1 || state->site.HasRank(device)) return ffi::Error::Success();
  return communicator.RequestCommunicator(ffi::GroupMode::kFlattenedId, WholeMesh(state->site),
                                          kCommunicationId);
}

// Finds the device's logical id in the mesh.
Status FindLogicalId(const CallSite& site, Communicator& communicator, int64_t* id) {
  *id = 0;
  if (site.num_devices() == 1) return {};
  auto lent =
      communicator.GetCommunicator(ffi::GroupMode::kFlattenedId, WholeMesh(site), kCommunicationId);
  if (lent.has_error()) {
    return FailedPrecondition("jax_ep: XLA lends no communicator of the mesh: ",
                              lent.error().message());
  }
  return RankIn(*lent, id);
}

// Makes the prepared call of a device at its first run.
Status PrepareOnce(TransferState* state, int32_t device, const ffi::RemainingArgs& operands,
                   const ffi::RemainingRets& results) {
  if (state->prepared.Find(device) != nullptr) return {};
  const TransferConfig& config = state->config;
  TransferCall call = {.call_site = state->site.id(),
                       .shape = {},
                       .num_sms = config.num_sms,
                       .num_lanes = config.num_lanes,
                       .row_align = config.row_align,
                       .zero_tail = config.zero_tail,
                       .has_weights = config.has_weights,
                       .has_scalars = config.has_scalars,
                       .repeats = config.repeats,
                       .allow_low_latency = !LowLatencyIsDisabled()};
  const TransferOperation& operation = state->operation;
  auto prepared = std::make_unique<PreparedTransfer>();
  const CurrentDevice current(device);
  Status status = current.status();
  if (status.ok()) {
    status = CheckCallBuffers(operation.check, config, operands, results, &call.shape);
  }
  if (status.ok()) status = operation.prepare(call, prepared.get());
  if (status.ok()) state->prepared.Set(device, std::move(prepared));
  return status;
}

// Runs after all communicators were acquired, before XLA's rendezvous and the launches. An error of
// this device goes through Enter, so that it fails the other devices, too.
ffi::Error Initialize(TransferState* state, cudaStream_t stream, int32_t device, ffi::RunId run,
                      Communicator communicator, ffi::RemainingArgs operands,
                      ffi::RemainingRets results) {
  CallSite::Arrival arrival = {.device = device, .stream = stream};
  arrival.status = PrepareOnce(state, device, operands, results);
  if (arrival.status.ok()) {
    arrival.workspace_bytes = std::visit(
        [](const auto& prepared) {
          return static_cast<int64_t>(CallOf(prepared.params).workspace_bytes);
        },
        *state->prepared.Find(device));
    if (!state->site.HasRank(device)) {
      arrival.status = FindLogicalId(state->site, communicator, &arrival.logical_id);
    }
  }
  return ToError(state->site.Enter(run.run_id, arrival));
}

XLA_FFI_DEFINE_HANDLER(kPrepare, Prepare,
                       ffi::Ffi::BindPrepare()
                           .Ctx<ffi::State<TransferState>>()
                           .Ctx<ffi::DeviceOrdinal>()
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

TransferState::TransferState(const TransferOperation& operation, TransferConfig config)
    : operation(operation),
      config(std::move(config)),
      site(this->config.Groups(), this->config.lane, {LoadAllKernels, LaunchStartGeneration}) {}

ffi::ErrorOr<std::unique_ptr<TransferState>> InstantiateTransfer(
    const TransferOperation& operation, const ffi::Dictionary& attributes,
    const ffi::RemainingArgs& operands, const ffi::RemainingRets& results) {
  TransferConfig config;
  const Status status =
      CheckInstantiate(operation.target, operation.check, attributes, operands, results, &config);
  if (!status.ok()) return ToError(status);
  return std::make_unique<TransferState>(operation, std::move(config));
}

Target TransferTarget(const char* name, XLA_FFI_Handler* instantiate, XLA_FFI_Handler* execute) {
  return {name, Address(instantiate), Address(kPrepare), Address(kInitialize), Address(execute)};
}

Status FindPrepared(const TransferState& state, int32_t device, const PreparedTransfer** prepared,
                    ControlBlock** control) {
  *prepared = state.prepared.Find(device);
  *control = state.site.control(device);
  if (*prepared != nullptr && *control != nullptr) return {};
  return FailedPrecondition(state.operation.target, ": GPU ", device,
                            " executes a call that it has not initialized");
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

}  // namespace jax_ep
