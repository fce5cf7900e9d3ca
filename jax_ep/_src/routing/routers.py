"""Routers: the experts of each token and their weights, from logits."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep._src.core import checks
from jax_ep._src.routing.selection import GroupScore, num_experts_of, select


class Routing(NamedTuple):
    """A router's result for tokens ``[...]``.

    Attributes:
      topk_ids: i32[..., K], the selected experts, best first; -1 for masked tokens.
      topk_weights: f32[..., K], their weights in `combine`; 0 for masked tokens.
      probabilities: f32[..., E], nonnegative, summing to 1; 0 for masked tokens. The gradient of
        the balancing loss flows through these.
    """

    topk_ids: jax.Array
    topk_weights: jax.Array
    probabilities: jax.Array


def softmax_topk(
    logits: jax.Array,
    top_k: int,
    *,
    renormalize: bool = True,
    scale: float = 1.0,
    bias: jax.Array | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: GroupScore = "top2",
    token_mask: jax.Array | None = None,
    topk_ids: jax.Array | None = None,
) -> Routing:
    """Softmax over all experts, then the K best (Shazeer et al. 2017, arXiv:1701.06538; Mixtral).

    For example::

        ids, weights, probabilities = jax_ep.routing.softmax_topk(x @ router, top_k=2)

    Args:
      logits: float[..., E].
      top_k: K.
      renormalize: whether to divide a token's weights by their sum. Otherwise the weights are the
        probabilities themselves, which Switch's router needs to get gradients with K = 1.
      scale: multiplies the weights (16 in DeepSeek-V2, which does not renormalize).
      bias: float[E] or None, as in `select`.
      num_groups: as in `select`.
      top_groups: as in `select`.
      group_score: as in `select`.
      token_mask: bool[...], False for tokens that are not routed (padding).
      topk_ids: int32[..., K] or None: the experts that an earlier call selected. They are weighted
        by these logits, with gradients, instead of selecting others. An id of -1 has no weight.

    Raises:
      ArgumentError: as for `select`, or `topk_ids` of other tokens.
    """
    logits, mask = masked_logits(logits, token_mask)
    scores = jax.nn.softmax(logits)
    ids = _selected(scores, top_k, topk_ids, bias, num_groups, top_groups, group_score)
    weights = _at(scores, ids, 0, topk_ids)
    if renormalize:
        selected = _normalized(_at(logits, ids, -jnp.inf, topk_ids))
        # A NaN shows in all weights of its token, selected or not.
        weights = jnp.where(jnp.isnan(weights), weights, selected)
    return masked(Routing(ids, weights * scale, scores), mask)


def sigmoid_topk(
    logits: jax.Array,
    top_k: int,
    *,
    renormalize: bool = True,
    scale: float = 1.0,
    bias: jax.Array | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: GroupScore = "top2",
    token_mask: jax.Array | None = None,
    topk_ids: jax.Array | None = None,
) -> Routing:
    """A sigmoid per expert, then the K best (DeepSeek-V3, arXiv:2412.19437).

    The selected scores are divided by their sum, unless ``renormalize=False``, then multiplied by
    `scale` (2.5 in DeepSeek-V3).
    The `probabilities` are the scores divided by their sum over all experts.

    For example::

        ids, weights, probabilities = jax_ep.routing.sigmoid_topk(x @ router, top_k=2, scale=2.5)

    Args:
      logits: float[..., E].
      top_k: K.
      renormalize: whether to divide a token's weights by their sum, before `scale`.
      scale: multiplies the weights.
      bias: float[E] or None, as in `select`.
      num_groups: as in `select`.
      top_groups: as in `select`.
      group_score: as in `select`.
      token_mask: bool[...], False for tokens that are not routed (padding).
      topk_ids: int32[..., K] or None: the experts that an earlier call selected. They are weighted
        by these logits, with gradients, instead of selecting others. An id of -1 has no weight.

    Raises:
      ArgumentError: as for `select`, or `topk_ids` of other tokens.
    """
    logits, mask = masked_logits(logits, token_mask)
    scores = jax.nn.sigmoid(logits)
    ids = _selected(scores, top_k, topk_ids, bias, num_groups, top_groups, group_score)
    log_scores = jax.nn.log_sigmoid(logits)
    if renormalize:
        weights = _normalized(_at(log_scores, ids, -jnp.inf, topk_ids))
    else:
        weights = _at(scores, ids, 0, topk_ids)
    return masked(Routing(ids, weights * scale, _normalized(log_scores)), mask)


def _selected(
    scores: jax.Array,
    top_k: int,
    topk_ids: jax.Array | None,
    bias: jax.Array | None,
    num_groups: int,
    top_groups: int,
    group_score: GroupScore,
) -> jax.Array:
    """Returns the ids that are given, or those of the best scores."""
    if topk_ids is not None:
        return _given(topk_ids, (*scores.shape[:-1], top_k))
    return select(
        scores,
        top_k,
        bias=bias,
        num_groups=num_groups,
        top_groups=top_groups,
        group_score=group_score,
    )


def masked_logits(logits: jax.Array, token_mask: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """float32 logits, 0 for masked tokens so that NaN there reaches no gradient; and the mask."""
    num_experts_of("logits", logits)
    logits = logits.astype(jnp.float32)
    if token_mask is None:
        return logits, jnp.ones(logits.shape[:-1], jnp.bool_)
    if getattr(token_mask, "shape", None) != logits.shape[:-1]:  # equal sizes may be symbolic
        checks.shape("routing", "token_mask", token_mask, logits.shape[:-1])
    mask = token_mask.astype(jnp.bool_)  # integers are not summed
    return jnp.where(mask[..., None], logits, 0), mask


def masked(routing: Routing, mask: jax.Array) -> Routing:
    mask = mask[..., None]
    return Routing(
        jnp.where(mask, routing.topk_ids, -1),
        jnp.where(mask, routing.topk_weights, 0),
        jnp.where(mask, routing.probabilities, 0),
    )


def _given(topk_ids: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    checks.shape("routing", "topk_ids", topk_ids, shape)
    checks.ids_dtype("routing", topk_ids)
    return lax.stop_gradient(topk_ids)


def _at(values: jax.Array, ids: jax.Array, elsewhere: float, given: jax.Array | None) -> jax.Array:
    """Values [..., E] of the experts; `elsewhere` for given ids that are no experts."""
    if given is None:
        return jnp.take_along_axis(values, ids, axis=-1)
    is_expert = (ids >= 0) & (ids < values.shape[-1])
    found = jnp.take_along_axis(values, jnp.where(is_expert, ids, 0), axis=-1)
    return jnp.where(is_expert, found, elsewhere)


def _normalized(log_scores: jax.Array) -> jax.Array:
    """Scores over their sum, from their logarithms; zeros if all scores are 0."""
    scored = (log_scores != -jnp.inf).any(-1, keepdims=True)
    return jnp.where(scored, jax.nn.softmax(jnp.where(scored, log_scores, 0)), 0)
