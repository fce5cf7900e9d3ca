"""Routers: the experts of each token, their weights, and how evenly the load spreads.

These are pure functions of float arrays with any leading shape ``[...]`` (tokens), which work under
`jit`, `grad` and `vmap`, inside and outside `shard_map`, and compute everything in float32. E is
the number of experts, K the number of experts per token.

Selection is deterministic everywhere: among equal scores the lower expert id wins, and NaN ranks
below every number. Ids are therefore always distinct and within [0, E). If logits are NaN, weights
and losses are NaN as well, so that the failure shows.

Normalized weights are computed from logits, as a softmax over the selected experts, because scores
underflow, and their sum with them. So weights, probabilities and gradients are accurate for all
finite logits, however small the scores. A logit of -inf disables an expert, whose weight is 0.
"""

from __future__ import annotations

from jax_ep._src.routing.losses import (
    balancing_loss,
    load,
    load_fractions,
    updated_bias,
    z_loss,
)
from jax_ep._src.routing.routers import Routing, sigmoid_topk, softmax_topk
from jax_ep._src.routing.selection import select

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
