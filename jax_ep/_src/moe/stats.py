"""The counts of a layer: those of its plan, summed over token chunks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jax_ep._src.core import compat
from jax_ep._src.transfer.plan import Plan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Stats:
    """Counts of one `moe_mlp` call: a pytree. Later versions may add members.

    Every array has one dimension, so that one ``P(axis_name)`` takes all out of `shard_map` and
    concatenates the ranks' counts. Token chunks are summed, but status is their largest.

    Attributes:
      num_dropped: int32[1], assignments to this rank that did not fit into its capacity.
      num_received: int32[1], assignments to this rank, including dropped ones.
      num_bad_ids: int32[1], ids of this rank's tokens outside [-1, E).
      expert_rows: int32[L], rows that each local expert computed, without padding and, unlike
        `routing.load`, without dropped assignments.
      status: int32[1], 0 if the exchange succeeded; `jax_ep.check()` raises the reason.
    """

    num_dropped: jax.Array
    num_received: jax.Array
    num_bad_ids: jax.Array
    expert_rows: jax.Array
    status: jax.Array


def no_stats(num_local: int, like: jax.Array) -> Stats:
    """Returns the stats of no tokens, varying over the axes of `like`."""
    counts = [jnp.zeros(n, jnp.int32) for n in (1, 1, 1, num_local, 1)]
    return Stats(*(compat.vary_over(n, compat.varying_axes(like)) for n in counts))


def stats_of(plan: Plan) -> Stats:
    """Returns the counts of one call."""
    return Stats(
        num_dropped=plan.num_dropped,
        num_received=plan.num_received,
        num_bad_ids=plan.num_bad_ids,
        expert_rows=plan.real_group_sizes,
        status=plan.status,
    )


def sum_of(chunks: list[Stats]) -> Stats:
    """Returns the counts of all chunks."""
    total = jax.tree.map(lambda *counts: jnp.stack(counts).sum(0), *chunks)
    status = jnp.stack([stats.status for stats in chunks]).max(0)
    return dataclasses.replace(total, status=status)
