"""Identity experts, with the ids past the others: they return their input, and get no transfer."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_ep._src.layer.config import Config
from jax_ep._src.routing.routers import Routing


def sent_ids(config: Config, topk_ids: jax.Array) -> jax.Array:
    """Returns the ids with -1 for identity experts."""
    if not config.num_identity_experts:
        return topk_ids
    return jnp.where(_is_identity(config, topk_ids), -1, topk_ids)


def identity_output(config: Config, tokens: jax.Array, routed: Routing) -> jax.Array:
    """Returns [T, H] of the tokens' dtype: tokens times their weights for identity experts."""
    is_identity = _is_identity(config, routed.topk_ids)
    weights = jnp.where(is_identity, routed.topk_weights, 0).sum(-1, keepdims=True)
    return (weights * tokens.astype(jnp.float32)).astype(tokens.dtype)


def _is_identity(config: Config, topk_ids: jax.Array) -> jax.Array:
    return (topk_ids >= config.num_experts) & (topk_ids < config.num_logits)
