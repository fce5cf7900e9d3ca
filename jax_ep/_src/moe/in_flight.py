"""moe_mlp with transfers in flight, beside a shared expert and the experts of other chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jax_ep._src.core.errors import ArgumentError
from jax_ep._src.matmul.accumulation import Accumulators
from jax_ep._src.mlp.experts import Experts
from jax_ep._src.moe.chunks import Chain, joined, split
from jax_ep._src.moe.moe_experts import computed
from jax_ep._src.moe.params import COMBINE_LANE, DISPATCH_LANE, MoeMlpParams
from jax_ep._src.moe.stats import Stats, stats_of
from jax_ep._src.transfer.combine import checked_combine
from jax_ep._src.transfer.combine_start import checked_combine_start, combine_done
from jax_ep._src.transfer.dispatch_start import checked_dispatch_start, dispatch_done
from jax_ep._src.transfer.in_flight import InFlight, overlap


def chunks_in_flight(
    tokens: tuple[Any, ...],
    experts: Experts,
    params: MoeMlpParams,
    num_chunks: int,
    shared: Callable[[jax.Array, int], jax.Array] | None,
) -> tuple[jax.Array, Stats, Accumulators, jax.Array | None]:
    """Returns the results of `in_chunks`, and the shared expert's.

    The first dispatch is in flight beside the shared expert, a function of x and the number of SMs.
    Later ones, and the combine of the chunk before, are in flight beside the experts of a chunk.
    """

    def start(chunk: tuple[Any, ...]) -> InFlight:
        x, topk_ids, topk_weights = chunk
        return checked_dispatch_start(x, topk_ids, topk_weights, params.in_flight(DISPATCH_LANE))

    chain = Chain(experts, params, num_chunks)
    chunks = split(tokens, num_chunks)
    first, shared_out = start(chunks[0]), None
    if shared is not None:
        sms = params.beside(1).mlp.num_sms
        first, shared_out = overlap(first, lambda x: shared(x, sms), tokens[0])
    sending: InFlight | None = first
    returning: InFlight | None = None
    outs: list[jax.Array] = []
    all_stats: list[Stats] = []
    for index in range(num_chunks):
        assert sending is not None
        sent = dispatch_done(sending)
        sending = start(chunks[index + 1]) if index + 1 < num_chunks else None
        in_flight = tuple(each for each in (sending, returning) if each is not None)
        experts, of_chunk = chain.next()
        of_chunk = of_chunk.beside(len(in_flight))
        compute = lambda sent, experts, p=of_chunk: computed(sent, experts, p)  # noqa: E731
        in_flight, (y, accumulators) = _beside(in_flight, compute, sent, experts)
        chain.add(accumulators)
        if returning is not None:
            *in_flight, returning = in_flight
            outs.append(combine_done(returning))
        if sending is not None:
            (sending,) = in_flight
            returning = checked_combine_start(y, sent.plan, None, params.in_flight(COMBINE_LANE))
        else:
            outs.append(checked_combine(y, sent.plan, None, params.transfer))
        all_stats.append(stats_of(sent.plan))
    return *joined(outs, all_stats), accumulators, shared_out


def _beside(
    in_flight: tuple[InFlight, ...], function: Callable[..., Any], *arguments: Any
) -> tuple[Any, Any]:
    return overlap(in_flight, function, *arguments) if in_flight else ((), function(*arguments))


def check_overlap(
    operation: str,
    overlap: bool | None,
    *,
    is_named: bool,
    remat: Any,
    params: MoeMlpParams,
) -> bool:
    """Returns whether transfers are in flight, or raises."""
    if not overlap:  # measurements let None be False for all shapes
        return False
    if remat == "experts":
        given = f"remat={remat!r}"
    elif params.sends_quantized_rows or params.sends_quantized_cotangents:
        given = "quantized transfers"
    elif not is_named:
        given = "a function of yours"
    elif remat == "dispatch" and params.mlp.quantization is not None:
        given = "remat='dispatch' and quantized matmuls"
    elif remat == "dispatch" and params.weights_on_input:
        given = "remat='dispatch' and weights_on_input=True"
    else:
        return True
    raise ArgumentError(
        f"jax_ep.{operation}: overlap=True is given with {given}; expected remat=None, or "
        "'dispatch' without quantization and weights_on_input, rows that are sent as floats, and "
        "an activation that has a name. Leave overlap out, or give these."
    )
