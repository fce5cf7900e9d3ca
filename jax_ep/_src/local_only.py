"""local_only: each rank has all tokens, and computes its own experts on them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep._src import checks
from jax_ep._src.params import MoeMlpParams


def only_own_experts(topk_ids: jax.Array, params: MoeMlpParams) -> tuple[jax.Array, MoeMlpParams]:
    """Returns the ids and parameters of a layer of one rank, whose experts are this rank's.

    Experts of other ranks become -1. Ids outside [-1, E) stay so.
    """
    num_ranks, num_experts = params.axis.size, params.num_experts
    num_local = num_experts // num_ranks
    local_ids = topk_ids - lax.axis_index(params.axis.name) * num_local
    is_own = (local_ids >= 0) & (local_ids < num_local)
    is_routed = (topk_ids >= 0) & (topk_ids < num_experts)
    ids = jnp.where(is_own & is_routed, local_ids, jnp.where(is_routed, -1, topk_ids))
    factor = params.capacity_factor
    of_one_rank = dataclasses.replace(
        params,
        num_experts=num_local,
        axis=checks.own_axis(),
        # A rank's even share is that of T * K / R assignments.
        capacity_factor=None if factor is None else factor / num_ranks,
    )
    return ids, of_one_rank
