"""num_chunks: one call after another, whose gradients of the matrices are one chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep._src.core import compat
from jax_ep._src.matmul.accumulation import Accumulation, Accumulators, stand_in
from jax_ep._src.mlp.experts import Experts
from jax_ep._src.moe.moe_experts import Outputs
from jax_ep._src.moe.params import MoeMlpParams
from jax_ep._src.moe.stats import Stats, stats_of, sum_of


class Chain:
    """The experts and parameters of each chunk's call.

    Each call adds its gradients of the matrices to those of later ones.
    """

    def __init__(self, experts: Experts | None, params: MoeMlpParams, num_chunks: int) -> None:
        self._params = params
        self._calls_left = num_chunks
        self._is_given = experts is not None and experts.accumulators.w_up is not None
        self._is_chain = self._is_given or num_chunks > 1
        if self._is_given:
            experts = _constant(experts)
        elif num_chunks > 1 and experts is not None and experts.w_up is not None:
            stand_ins = Accumulators(stand_in(experts.w_up), stand_in(experts.w_down))
            experts = _constant(experts._replace(accumulators=stand_ins))
        self._experts = experts

    def next(self) -> tuple[Any, MoeMlpParams]:
        """Returns those of the next call."""
        self._calls_left -= 1
        if not self._is_chain:
            return self._experts, self._params
        is_first_sum = self._calls_left == 0 and not self._is_given  # in the backward pass
        accumulation = Accumulation.FIRST if is_first_sum else Accumulation.NEXT
        return self._experts, self._params.accumulating(accumulation)

    def add(self, accumulators: Accumulators) -> None:
        """Takes the accumulators that a call returned, for the next one."""
        if self._experts is not None and self._is_chain:
            self._experts = self._experts._replace(accumulators=accumulators)


def in_chunks(
    compute: Callable[..., Outputs],
    tokens: tuple[Any, ...],
    experts: Experts | None,
    params: MoeMlpParams,
    num_chunks: int,
) -> tuple[jax.Array, Stats, Accumulators]:
    """Runs dispatch, experts and combine for each chunk of the tokens."""
    chain = Chain(experts, params, num_chunks)
    outs: list[jax.Array] = []
    all_stats: list[Stats] = []
    for chunk in split(tokens, num_chunks):
        experts, of_chunk = chain.next()
        out, plan, accumulators = compute(*chunk, experts=experts, params=of_chunk)
        chain.add(accumulators)
        outs.append(out)
        all_stats.append(stats_of(plan))
    return *joined(outs, all_stats), accumulators


def _constant(experts: Experts | None) -> Experts | None:
    """Returns experts of a chain: the gradients of their matrices are those of the accumulators."""
    if experts is None:
        return None
    w_up, w_down = compat.without_gradients((experts.w_up, experts.w_down))
    return experts._replace(w_up=w_up, w_down=w_down)


def joined(outs: list[jax.Array], all_stats: list[Stats]) -> tuple[jax.Array, Stats]:
    """Returns the result and the counts of all chunks."""
    if len(outs) == 1:
        return outs[0], all_stats[0]
    return jnp.concatenate(outs), sum_of(all_stats)


def split(tokens: tuple[Any, ...], num_chunks: int) -> list[tuple[Any, ...]]:
    """Returns the arrays of each chunk."""
    if num_chunks == 1:
        return [tokens]
    parts = [[None] * num_chunks if a is None else jnp.split(a, num_chunks) for a in tokens]
    return list(zip(*parts, strict=True))
