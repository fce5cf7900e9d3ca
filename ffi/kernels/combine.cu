// combine in one kernel. Its parts are handed out in order:
//
//   parts of the plan   inverted, so that each token finds its rows
//   tokens              of all ranks, chunk by chunk, in pieces if there are few: their rows here
//                       are summed and sent to their rank; and, some chunks later, those of this
//                       rank, which are added up from what all ranks sent
#include "ffi/device/combine_tickets.h"
#include "ffi/device/numbers.cuh"
#include "ffi/device/rows.cuh"
#include "ffi/device/signal.cuh"
#include "ffi/device/tickets.cuh"
#include "ffi/kernels/stages.h"

namespace jax_ep {
namespace {

// This rank's rows of a token of a rank, weighted and summed, to the slot there that is this
// rank's: a piece of them. By one warp.
template <typename Type>
__device__ void ReducePiece(const CombineStage& stage, int32_t end, const CombineTicket& ticket) {
  constexpr int kLoads = 2;  // chunks of a lane at once
  constexpr int kRows = 2;   // of each of so many rows
  const Call& call = stage.call;
  const int source = ticket.rank;
  const int token = ticket.token;
  const TokenRows found = RowsOfToken(call, stage.plan, end, source, token);
  if (found.choices == 0) return;
  const int lane = threadIdx.x % 32;

  float weights[2] = {1, 1};
  for (int half = 0; half < 2; ++half) {
    const int32_t row = found.rows[half];
    if (row < 0) continue;
    if (stage.has_weights) weights[half] = stage.row_weights[row];
    if (stage.has_scalars && ticket.piece == 0) {
      float* const scalars = call.Of<float>(source, kChoiceScalars) + token * call.top_k;
      scalars[lane + 32 * half] = stage.row_scalars[row];
    }
  }

  // The plan's word for a place in a peer's memory: checked like every index.
  const int32_t slot = stage.plan.row_slot[found.RowOf(__ffsll(found.choices) - 1)];
  if (slot < 0 || slot >= call.num_slots) return;
  uint4* const to = call.Of<uint4>(source, kPartialRows) +
                    (int64_t{token} * call.num_slots + slot) * call.row_chunks;
  const uint4* const y = static_cast<const uint4*>(stage.y);
  const int end_chunk = stage.tickets.EndOf(ticket.piece);
  for (int base = stage.tickets.FirstOf(ticket.piece) + lane; base - lane < end_chunk;
       base += 32 * kLoads) {
    float sums[kLoads][kPerChunk<Type>] = {};
    for (uint64_t left = found.choices; left != 0;) {
      uint4 chunks[kRows][kLoads];
      float row_weights[kRows];
      bool is_there[kRows];
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        is_there[row] = left != 0;
        if (!is_there[row]) continue;
        const int k = __ffsll(left) - 1;
        left &= left - 1;
        const uint4* const from = y + int64_t{found.RowOf(k)} * call.row_chunks;
        row_weights[row] = __shfl_sync(kWholeWarp, k < 32 ? weights[0] : weights[1], k % 32);
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          if (base + 32 * i < end_chunk) chunks[row][i] = from[base + 32 * i];
        }
      }
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        if (!is_there[row]) continue;
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          if (base + 32 * i >= end_chunk) continue;
          float values[kPerChunk<Type>];
          UnpackChunk<Type>(chunks[row][i], values);
#pragma unroll
          for (int j = 0; j < kPerChunk<Type>; ++j) {
            sums[i][j] = __fmaf_rn(row_weights[row], values[j], sums[i][j]);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (base + 32 * i < end_chunk) to[base + 32 * i] = PackChunk<Type>(sums[i]);
    }
  }
}

// Adds up what the ranks sent for a token of this rank, in rank order: a piece of it. By one warp.
template <typename Type>
__device__ void SumPiece(const CombineStage& stage, const CombineTicket& ticket) {
  constexpr int kLoads = 2;  // chunks at once, of each of two slots
  const Call& call = stage.call;
  const int rank = ticket.rank;
  const int token = ticket.token;
  const int lane = threadIdx.x % 32;

  uint32_t low = 0;  // a bit for each rank that the token visits
  uint32_t high = 0;
  for (int half = 0; half < 2; ++half) {
    const int k = lane + 32 * half;
    if (k >= call.top_k) continue;
    const int choice = token * call.top_k + k;
    const int32_t destination = stage.plan.destination[choice];
    const bool kept = 0 <= destination && destination < call.num_ranks;
    if (kept) (destination < 32 ? low : high) |= 1u << destination % 32;
    if (stage.has_scalars && ticket.piece == 0) {
      const float* const scalars = call.Of<float>(rank, kChoiceScalars);
      stage.choice_scalars[choice] = kept ? LoadShared4(&scalars[choice]) : 0;
    }
  }
  const int num_sums =
      min(__popc(__reduce_or_sync(kWholeWarp, low)) + __popc(__reduce_or_sync(kWholeWarp, high)),
          call.num_slots);

  const uint4* const from =
      call.Of<uint4>(rank, kPartialRows) + int64_t{token} * call.num_slots * call.row_chunks;
  uint4* const to = static_cast<uint4*>(stage.out) + int64_t{token} * call.row_chunks;
  const int end_chunk = stage.tickets.EndOf(ticket.piece);
  for (int base = stage.tickets.FirstOf(ticket.piece) + lane; base < end_chunk;
       base += 32 * kLoads) {
    // From +0, like the reference, whose sum goes over all ranks: adding +0 changes nothing.
    float sums[kLoads][kPerChunk<Type>] = {};
#pragma unroll 2
    for (int slot = 0; slot < num_sums; ++slot) {
      uint4 chunks[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (base + 32 * i < end_chunk) {
          chunks[i] = LoadShared16(&from[int64_t{slot} * call.row_chunks + base + 32 * i]);
        }
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (base + 32 * i >= end_chunk) continue;
        float values[kPerChunk<Type>];
        UnpackChunk<Type>(chunks[i], values);
#pragma unroll
        for (int j = 0; j < kPerChunk<Type>; ++j) {
          sums[i][j] = __fadd_rn(sums[i][j], values[j]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (base + 32 * i < end_chunk) to[base + 32 * i] = PackChunk<Type>(sums[i]);
    }
  }
}

// This warp's part of a chunk of a rank's tokens is stored there; the last one says so.
__device__ void FinishReduce(const CombineStage& stage, const CombineTicket& ticket,
                             uint64_t epoch) {
  ControlBlock* const control = stage.call.control;
  __syncwarp();
  if (threadIdx.x % 32 != 0) return;
  // As in FinishPart: this warp's stores are performed at system scope before they are counted.
  FenceSystem();
  const uint32_t before =
      AddAcquireReleaseDevice(&control->progress.chunks_finished[ticket.rank][ticket.chunk], 1);
  if (before + 1 != static_cast<uint32_t>(stage.tickets.TicketsOf(ticket.chunk))) return;
  // SIGNAL_CHUNK
  StoreReleaseSystem(&control->peers[ticket.rank].control->chunks[control->rank][ticket.chunk],
                     epoch);
}

// By all warps, until there are no more tickets.
template <typename Type>
__device__ void CombineTokens(const CombineStage& stage, uint64_t epoch) {
  const Call& call = stage.call;
  Progress& progress = call.control->progress;
  const int32_t end = EndOfRows(call, stage.plan);
  int number;
  while ((number = NextTicketOfWarp(&progress.warp_tickets[0])) < stage.tickets.Count()) {
    const CombineTicket ticket = stage.tickets.At(number, call.control->rank);
    if (ticket.token < 0) continue;
    if (ticket.is_sum) {
      const Outcome outcome = WaitForChunk(call, ticket.chunk, epoch);  // WAIT_CHUNK
      if (outcome != Outcome::kArrived) {
        // The last block makes all results safe.
        if (threadIdx.x % 32 == 0) atomicExch(&progress.failure, static_cast<uint32_t>(outcome));
        return;
      }
    }
    if (ticket.is_sum) {
      SumPiece<Type>(stage, ticket);
    } else {
      ReducePiece<Type>(stage, end, ticket);
      FinishReduce(stage, ticket, epoch);
    }
  }
}

__device__ void FillWithNan(const CombineStage& stage, const Threads& threads) {
  const Call& call = stage.call;
  Fill(threads, static_cast<uint4*>(stage.out), int64_t{call.num_tokens} * call.row_chunks,
       RepeatWord(call.nan_word));
  if (stage.has_scalars) Fill(threads, stage.choice_scalars, call.num_choices(), Nan());
}

}  // namespace

template <typename Type>
__global__ void __launch_bounds__(kCombineThreads, 2)
    CombineKernel(const __grid_constant__ CombineStage stage) {
  const Call& call = stage.call;
  Progress& progress = call.control->progress;
  const uint64_t epoch = CurrentEpoch(call);
  const bool poisoned = *stage.plan.status != 0;

  Outcome outcome = PassGate(call, Gate::kFree, epoch);  // WAIT_FREE
  for (int ticket; (ticket = NextTicket(&progress.tickets)) < call.num_tiles;) {
    if (outcome == Outcome::kArrived) {
      // A poisoned rank sends no sums, so its peers must not add up what their slots happen to
      // hold.
      if (ticket == 0) SignalReady(call, epoch, poisoned);
      IndexRows(call, stage.plan, ticket, call.num_tiles);
    }
    FinishPart(&progress.finished[0], call.num_tiles, false);
  }
  AwaitParts(&progress.finished[0], call.num_tiles);

  outcome = PassGate(call, Gate::kReady, epoch);  // WAIT_READY
  if (outcome == Outcome::kArrived && !poisoned) {
    CombineTokens<Type>(stage, epoch);
  } else {
    FillWithNan(stage, Threads::OfGrid());
  }
  if (!IsLastBlock(call)) return;
  const auto failure = static_cast<Outcome>(LoadAcquireDevice(&progress.failure));
  __syncthreads();  // before it is reset
  FinishCall(call, epoch, failure == Outcome::kArrived ? outcome : failure);
  if (failure != Outcome::kArrived) FillWithNan(stage, Threads::OfBlock());
}

template __global__ void CombineKernel<BFloat16>(const __grid_constant__ CombineStage stage);
template __global__ void CombineKernel<Float16>(const __grid_constant__ CombineStage stage);
template __global__ void CombineKernel<Float32>(const __grid_constant__ CombineStage stage);

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // a compile check of the device code alone stops here

namespace jax_ep {

const void* CombineKernelAddress(RowType type) {
  switch (type) {
    case RowType::kBFloat16:
      return reinterpret_cast<const void*>(CombineKernel<BFloat16>);
    case RowType::kFloat16:
      return reinterpret_cast<const void*>(CombineKernel<Float16>);
    case RowType::kFloat32:
      return reinterpret_cast<const void*>(CombineKernel<Float32>);
  }
  return nullptr;
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
