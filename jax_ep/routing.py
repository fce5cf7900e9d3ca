"""Routers: the experts of each token, their weights, and how evenly the load spreads.

Pure functions of float arrays with any leading shape ``[...]`` (tokens), usable under `jit`, `grad`
and `vmap`, inside and outside `shard_map`. Everything is computed in float32. E is the number of
experts, K the number of experts per token.

Selection is deterministic everywhere: among equal scores the lower expert id wins, and NaN ranks
below every number. So ids are always distinct and within [0, E), also when logits are NaN; weights
and losses then are NaN, so that the failure shows.

A normalized weight is computed from logits, as a softmax over the selected experts, because scores
underflow and their sum with them: weights, probabilities and gradients are accurate for all finite
logits, however small the scores. A logit of -inf disables an expert, whose weight is 0.
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
