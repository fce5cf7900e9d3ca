"""num_chunks: one call after another, whose gradients of the matrices are one chain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep._src.core import compat
from jax_ep._src.matmul.accumulation import Accumulation, Accumulators, stand_in
from jax_ep._src.mlp.experts import Experts
from jax_ep._src.moe.moe_experts import Outputs
from jax_ep._src.moe.params import MoeMlpParams
from jax_ep._src.moe.stats import Stats, stats_of, sum_of


def in_chunks(
    compute: Callable[..., Outputs],
    tokens: tuple[Any, ...],
    experts: Experts | None,
    params: MoeMlpParams,
    num_chunks: int,
) -> tuple[jax.Array, Stats, Accumulators]:
    """Runs dispatch, experts and combine for each chunk of the tokens."""

    def one(chunk: tuple[Any, ...], experts: Experts | None, params: MoeMlpParams) -> Any:
        y, plan, accumulators = compute(*chunk, experts=experts, params=params)
        return y, stats_of(plan), accumulators

    in_chain = experts is not None and experts.accumulators.w_up is not None
    if in_chain:
        experts = _constant(experts)
    if num_chunks == 1:
        return one(tokens, experts, params.accumulating(Accumulation.NEXT) if in_chain else params)
    # The chunks are a chain: each adds its gradients of the matrices to those of later ones.
    if experts is not None and experts.w_up is not None and not in_chain:
        stand_ins = Accumulators(stand_in(experts.w_up), stand_in(experts.w_down))
        experts = _constant(experts._replace(accumulators=stand_ins))
    outs: list[jax.Array] = []
    all_stats: list[Stats] = []
    for chunk in zip(*(_split(a, num_chunks) for a in tokens), strict=True):
        is_last = len(outs) + 1 == num_chunks
        is_first_sum = is_last and not in_chain  # in the backward pass
        of_chunk = params.accumulating(Accumulation.FIRST if is_first_sum else Accumulation.NEXT)
        out, stats, accumulators = one(chunk, experts, of_chunk)
        if experts is not None:
            experts = experts._replace(accumulators=accumulators)
        outs.append(out)
        all_stats.append(stats)
    return jnp.concatenate(outs), sum_of(all_stats), accumulators


def _constant(experts: Experts | None) -> Experts | None:
    """Returns experts of a chain: the gradients of their matrices are those of the accumulators."""
    if experts is None:
        return None
    w_up, w_down = compat.without_gradients((experts.w_up, experts.w_down))
    return experts._replace(w_up=w_up, w_down=w_down)


def _split(a: jax.Array | None, num_chunks: int) -> Sequence[jax.Array | None]:
    return [None] * num_chunks if a is None else jnp.split(a, num_chunks)
