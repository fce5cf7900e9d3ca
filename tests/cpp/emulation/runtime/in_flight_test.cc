// Tests calls in flight: beside calls of lane 0, several at once, and joins that find no call.
#include "ffi/runtime/calls/in_flight.h"

#include <chrono>
#include <thread>
#include <vector>

#include "tests/cpp/emulation/obstacle.h"
#include "tests/cpp/emulation/runtime/fixture.h"

namespace jax_ep::testing {
namespace {

// As Python's: lane 0 takes all SMs, the others a quarter each at most.
DispatchProgram OnLane(int64_t lane, int num_ranks, int num_tokens) {
  return {num_ranks, num_tokens, false, 0, {lane, lane == 0 ? 1 : 4, 0}};
}

BufferAddresses BuffersOf(const DispatchProgram& program, int r) {
  return {&program, &program + 1 + r};  // they are compared only
}

cudaStream_t Main(int r) { return StreamOf(r, 0); }

Status Enter(DispatchProgram& program, int64_t run, int r, int64_t lane) {
  cudaSetDevice(r);
  cudaStream_t stream = Main(r);
  Status status;
  if (lane > 0) status = InFlightCalls::OfProcess().FindStream(r, lane, &stream);
  CallSite::Arrival arrival = {.device = r, .stream = stream, .logical_id = r};
  arrival.workspace_bytes = program.workspace_bytes();
  arrival.status = status;
  return program.site->Enter(run, arrival);
}

Status Start(DispatchProgram& program, int r, int64_t lane) {
  cudaSetDevice(r);
  cudaStream_t stream = nullptr;
  InFlightCalls& calls = InFlightCalls::OfProcess();
  Status status = calls.Fork(r, lane, Main(r), &stream);
  if (status.ok()) status = program.Launch(r, stream);
  return status.ok() ? calls.Add(r, stream, BuffersOf(program, r)) : status;
}

Status Join(const DispatchProgram& program, int r) {
  return InFlightCalls::OfProcess().Join(r, Main(r), BuffersOf(program, r));
}

// Two calls of lane 1 and one of lane 2 are in flight beside a call of lane 0, on devices that are
// late at random. All are whole.
void TestBesideLaneZero() {
  Restart();
  const int64_t lanes[] = {1, 1, 2, 0};
  for (const int num_ranks : {1, 3}) {
    DispatchProgram programs[] = {OnLane(1, num_ranks, kMedium), OnLane(1, num_ranks, kSmall),
                                  OnLane(2, num_ranks, kMedium), OnLane(0, num_ranks, kMedium)};
    for (int round = 0; round < 5; ++round) {
      int64_t runs[4];
      for (int64_t& run : runs) run = NextRun();
      for (DispatchProgram& program : programs) program.Clear();
      const std::vector<Status> statuses = programs[0].OnAll([&](int r) {
        Status status;
        for (int i = 0; i < 4 && status.ok(); ++i)
          status = Enter(programs[i], runs[i], r, lanes[i]);
        std::this_thread::sleep_for(std::chrono::microseconds(r * 150 * round));
        for (int i = 0; i < 3 && status.ok(); ++i) status = Start(programs[i], r, lanes[i]);
        if (status.ok()) status = programs[3].Launch(r);
        for (int i : {2, 0, 1}) {
          if (status.ok()) status = Join(programs[i], r);
        }
        return status;
      });
      for (const Status& status : statuses) CHECK_OK(status);
      for (int r = 0; r < num_ranks; ++r) cudaStreamSynchronize(Main(r));
      for (const DispatchProgram& program : programs) {
        for (int r = 0; r < num_ranks; ++r) CHECK(program.IsRight(r));
      }
    }
  }
}

// A call in flight begins after what was in the stream before, and what follows the join waits.
void TestOrder() {
  Restart();
  DispatchProgram program = OnLane(1, 1, kSmall);
  const auto pause = [] { std::this_thread::sleep_for(std::chrono::milliseconds(30)); };
  for (int round = 0; round < 3; ++round) {
    program.Clear();
    CHECK_OK(Enter(program, NextRun(), 0, 1));
    Obstacle before(Main(0));
    CHECK_OK(Start(program, 0, 1));
    pause();
    CHECK(program.status(0) == -1);
    before.Remove();
    cudaStreamSynchronize(Main(0));

    cudaStream_t stream = nullptr;
    CHECK_OK(InFlightCalls::OfProcess().FindStream(0, 1, &stream));
    cudaStreamSynchronize(stream);
    CHECK(program.IsRight(0));
    Obstacle in_flight(stream);
    CHECK_OK(Start(program, 0, 1));
    CHECK_OK(Join(program, 0));
    pause();
    CHECK(cudaStreamQuery(Main(0)) == cudaErrorNotReady);
    in_flight.Remove();
    cudaStreamSynchronize(Main(0));
    CHECK(program.IsRight(0));
  }
}

void TestJoinsWithoutACall() {
  Restart();
  InFlightCalls& calls = InFlightCalls::OfProcess();
  DispatchProgram program = OnLane(1, 1, kSmall);
  CHECK_OK(Enter(program, NextRun(), 0, 1));
  CHECK_FAILS(Join(program, 0), "no call in flight has these results");
  CHECK_OK(Start(program, 0, 1));
  CHECK_OK(Join(program, 0));
  CHECK_FAILS(Join(program, 0), "no call in flight has these results");
  // Joins a call of another device, or one with an operand that XLA has moved.
  CHECK_OK(Start(program, 0, 1));
  CHECK_FAILS(Join(program, 1), "no call in flight has these results");
  BufferAddresses moved = BuffersOf(program, 0);
  moved[1] = nullptr;
  CHECK_FAILS(calls.Join(0, Main(0), moved), "XLA has copied buffer 1 of a call in flight");
  // Never joined, and started again.
  CHECK_OK(Start(program, 0, 1));
  CHECK_OK(Enter(program, NextRun(), 0, 1));
  CHECK_OK(Start(program, 0, 1));
  CHECK_OK(Join(program, 0));
  cudaStreamSynchronize(Main(0));
  CHECK(program.IsRight(0));
}

}  // namespace
}  // namespace jax_ep::testing

int main(int argc, char** argv) {
  using namespace jax_ep::testing;
  RegisterKernels();
  Obstacle::Register();
  return RunCases({{"beside lane 0", TestBesideLaneZero},
                   {"order", TestOrder},
                   {"joins without a call", TestJoinsWithoutACall}},
                  argc, argv);
}
