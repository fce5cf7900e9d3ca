"""local_only: each rank has all tokens, and computes its own experts on them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep._src.core.expert_axis import ExpertAxis


def only_own_experts(topk_ids: jax.Array, num_experts: int, axis: ExpertAxis) -> jax.Array:
    """Returns the ids in a layer of one rank, whose experts are this rank's.

    Experts of other ranks become -1. Ids outside [-1, E) stay so.
    """
    num_local = num_experts // axis.size
    local_ids = topk_ids - lax.axis_index(axis.name) * num_local
    is_own = (local_ids >= 0) & (local_ids < num_local)
    is_routed = (topk_ids >= 0) & (topk_ids < num_experts)
    return jnp.where(is_own & is_routed, local_ids, jnp.where(is_routed, -1, topk_ids))
