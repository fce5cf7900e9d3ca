"""Routers: the experts of each token, their weights, and how evenly the load spreads.

Pure functions of float arrays with any leading shape ``[...]`` (tokens), usable under `jit`, `grad`
and `vmap`, inside and outside `shard_map`. Everything is computed in float32. E is the number of
experts, K the number of experts per token.

Selection is deterministic everywhere: among equal scores the lower expert id wins, and NaN ranks
below every number. So ids are always distinct and within [0, E), also when logits are NaN; weights
and losses then are NaN, so that the failure shows.
"""

from __future__ import annotations

from jax_ep._src.routing.routers import (
    Routing,
    balancing_loss,
    load,
    load_fractions,
    select,
    sigmoid_topk,
    softmax_topk,
    updated_bias,
    z_loss,
)

__all__ = [
    "Routing",
    "balancing_loss",
    "load",
    "load_fractions",
    "select",
    "sigmoid_topk",
    "softmax_topk",
    "updated_bias",
    "z_loss",
]
