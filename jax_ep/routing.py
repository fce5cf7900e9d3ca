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

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep._src import checks
from jax_ep._src.errors import ArgumentError
from jax_ep._src.mesh import AxisName


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


# ---- routers


def softmax_topk(
    logits: jax.Array,
    top_k: int,
    *,
    renormalize: bool = True,
    bias: jax.Array | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    token_mask: jax.Array | None = None,
) -> Routing:
    """Softmax over all experts, then the K best (Shazeer et al. 2017, arXiv:1701.06538; Mixtral).

    Args:
      logits: float[..., E].
      top_k: K.
      renormalize: divide a token's weights by their sum. Without it the weights are the
        probabilities themselves (Switch: with K = 1 the router needs this to get gradients).
      bias: float[E] or None, as in `select`.
      num_groups: as in `select`.
      top_groups: as in `select`.
      token_mask: bool[...], False for tokens that are not to be routed (padding).

    Raises:
      ArgumentError: as `select`.
    """
    logits, mask = _masked_logits(logits, token_mask)
    scores = jax.nn.softmax(logits)
    ids = select(scores, top_k, bias=bias, num_groups=num_groups, top_groups=top_groups)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if renormalize:
        selected = _normalized(jnp.take_along_axis(logits, ids, axis=-1))
        # A NaN shows in all weights of its token, selected or not.
        weights = jnp.where(jnp.isnan(weights), weights, selected)
    return _masked(Routing(ids, weights, scores), mask)


def sigmoid_topk(
    logits: jax.Array,
    top_k: int,
    *,
    renormalize: bool = True,
    scale: float = 1.0,
    bias: jax.Array | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    token_mask: jax.Array | None = None,
) -> Routing:
    """A sigmoid per expert, then the K best (DeepSeek-V3, arXiv:2412.19437).

    The selected scores are divided by their sum, then multiplied by `scale` (2.5 in DeepSeek-V3).
    `probabilities` are the scores divided by their sum over all experts.

    Args:
      logits: float[..., E].
      top_k: K.
      renormalize: divide a token's weights by their sum, before `scale`.
      scale: multiplies the weights.
      bias: float[E] or None, as in `select`.
      num_groups: as in `select`.
      top_groups: as in `select`.
      token_mask: bool[...], False for tokens that are not to be routed (padding).

    Raises:
      ArgumentError: as `select`.
    """
    logits, mask = _masked_logits(logits, token_mask)
    scores = jax.nn.sigmoid(logits)
    ids = select(scores, top_k, bias=bias, num_groups=num_groups, top_groups=top_groups)
    log_scores = jax.nn.log_sigmoid(logits)
    if renormalize:
        weights = _normalized(jnp.take_along_axis(log_scores, ids, axis=-1))
    else:
        weights = jnp.take_along_axis(scores, ids, axis=-1)
    return _masked(Routing(ids, weights * scale, _normalized(log_scores)), mask)


def select(
    scores: jax.Array,
    top_k: int,
    *,
    bias: jax.Array | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
) -> jax.Array:
    """The ids of the K best experts, best first; no gradient flows through the selection.

    Args:
      scores: float[..., E].
      top_k: K.
      bias: float[E], added to the scores for the selection only: the weights stay those of the
        unbiased scores, so balancing by bias needs no loss (arXiv:2408.15664; see `updated_bias`).
      num_groups: the experts form this many groups of neighbors, e.g. one per node.
      top_groups: select only from this many groups, those whose two best scores (with bias) have
        the largest sum (DeepSeek-V3). It bounds the number of ranks or nodes a token is sent to.

    Returns:
      i32[..., K].

    Raises:
      ArgumentError: K, `num_groups` and `top_groups` do not fit the number of experts.
      DtypeError: K is no int.
    """
    num_experts = _num_experts("scores", scores)
    _check_selection(num_experts, top_k, num_groups, top_groups)
    scores = scores.astype(jnp.float32)
    if bias is not None:
        checks.shape("routing", "bias", bias, (num_experts,))
        scores = scores + _along_last(bias.astype(jnp.float32), scores.ndim)
    # Numbers rank above NaN, and NaN above the experts of groups that are not selected (-inf).
    lowest = float(jnp.finfo(jnp.float32).min)
    scores = jnp.nan_to_num(lax.stop_gradient(scores), nan=lowest, neginf=lowest, posinf=-lowest)
    if top_groups < num_groups:
        grouped = scores.reshape(*scores.shape[:-1], num_groups, num_experts // num_groups)
        group_scores = lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
        groups = lax.top_k(group_scores, top_groups)[1]
        selected = _one_hot(groups, num_groups).any(-2)
        scores = jnp.where(selected[..., None], grouped, -jnp.inf).reshape(scores.shape)
    return lax.top_k(scores, top_k)[1].astype(jnp.int32)


# ---- load and losses


def load(topk_ids: jax.Array, num_experts: int, *, token_axes: AxisName | None = None) -> jax.Array:
    """Counts the assignments to each expert.

    Args:
      topk_ids: i32[..., K]. Ids outside [0, E) are not counted.
      num_experts: E.
      token_axes: inside `shard_map`, the mesh axes that the tokens are sharded over: the counts are
        those of all tokens.

    Returns:
      i32[E].
    """
    checks.array("routing", "topk_ids", topk_ids)
    hits = _one_hot(topk_ids.reshape(-1), num_experts)
    return _sum_over(hits.sum(0, dtype=jnp.int32), token_axes)


def load_fractions(counts: jax.Array) -> jax.Array:
    """`load` as shares of all assignments: f32[E] that sums to 1, or zeros if there are none."""
    _num_experts("counts", counts)
    counts = counts.astype(jnp.float32)
    total = counts.sum(-1, keepdims=True)
    return counts / jnp.where(total > 0, total, 1)  # means of several loads may be below 1


def balancing_loss(
    probabilities: jax.Array, topk_ids: jax.Array, *, token_axes: AxisName | None = None
) -> jax.Array:
    """E * sum_e f_e P_e (GShard, arXiv:2006.16668; Switch Transformer, arXiv:2101.03961).

    f_e is expert e's share of the assignments, P_e its mean probability over the routed tokens.
    It is 1 when the load is even and at most E; gradients flow through P only.

    Args:
      probabilities: float[..., E], of `Routing`.
      topk_ids: i32[..., K]. Tokens without any id >= 0 count neither in f nor in P.
      token_axes: inside `shard_map`, the mesh axes that the tokens are sharded over: f and P then
        are those of all tokens, so the loss does not depend on how they are sharded.

    Returns:
      f32[].

    Raises:
      ArgumentError: `probabilities` and `topk_ids` are not of the same tokens.
    """
    num_experts = _num_experts("probabilities", probabilities)
    checks.array("routing", "topk_ids", topk_ids)
    if not topk_ids.shape or topk_ids.shape[:-1] != probabilities.shape[:-1]:
        checks.shape("routing", "topk_ids", topk_ids, (*probabilities.shape[:-1], "top_k"))
    routed = (topk_ids >= 0).any(-1)
    total = jnp.where(routed[..., None], probabilities.astype(jnp.float32), 0)
    total = _sum_over(total.reshape(-1, num_experts).sum(0), token_axes)
    num_tokens = _sum_over(routed.sum(dtype=jnp.float32), token_axes)
    fractions = load_fractions(load(topk_ids, num_experts, token_axes=token_axes))
    return num_experts * jnp.sum(fractions * total) / jnp.maximum(num_tokens, 1)


def z_loss(
    logits: jax.Array,
    *,
    token_mask: jax.Array | None = None,
    token_axes: AxisName | None = None,
) -> jax.Array:
    """The mean of logsumexp(logits)^2, which keeps router logits small (ST-MoE, arXiv:2202.08906).

    Args:
      logits: float[..., E].
      token_mask: bool[...], False for tokens that do not count.
      token_axes: as in `balancing_loss`.

    Returns:
      f32[].
    """
    logits, mask = _masked_logits(logits, token_mask)
    squares = jnp.square(jax.nn.logsumexp(logits, axis=-1))
    num_tokens = _sum_over(mask.sum(dtype=jnp.float32), token_axes)
    return _sum_over(jnp.where(mask, squares, 0).sum(), token_axes) / jnp.maximum(num_tokens, 1)


def updated_bias(bias: jax.Array, counts: jax.Array, *, rate: float = 1e-3) -> jax.Array:
    """The next selection bias: up for experts below the mean load, down for those above.

    Loss-free balancing (arXiv:2408.15664). Call it once per step, outside the gradient.

    Args:
      bias: float[..., E], as given to a router; leading dimensions are those of stacked layers.
      counts: i32[..., E], the step's `load`.
      rate: the size of a step, in units of the router's scores.

    Returns:
      float[..., E], of bias's dtype.

    Raises:
      ArgumentError: `bias` and `counts` have different shapes.
    """
    num_experts = _num_experts("bias", bias)
    checks.shape("routing", "counts", counts, bias.shape)
    counts = counts.astype(jnp.float32)
    # Multiplied, because XLA rounds a mean: an expert at the mean stays where it is.
    below = jnp.sign(counts.sum(-1, keepdims=True) - num_experts * counts)
    return bias + (rate * below).astype(bias.dtype)


# ---- small helpers


def _check_selection(num_experts: int, top_k: int, num_groups: int, top_groups: int) -> None:
    checks.integer("routing", "num_groups", num_groups, least=0)
    checks.integer("routing", "top_groups", top_groups, least=0)
    if num_groups < 1 or num_experts % num_groups or not 1 <= top_groups <= num_groups:
        raise ArgumentError(
            f"jax_ep.routing: num_groups={num_groups}, top_groups={top_groups} do not fit "
            f"{num_experts} experts. num_groups must divide the number of experts, and top_groups "
            "be between 1 and num_groups."
        )
    checks.integer("routing", "top_k", top_k, least=0)
    num_candidates = num_experts // num_groups * top_groups
    if not 1 <= top_k <= num_candidates:
        raise ArgumentError(
            f"jax_ep.routing: top_k={top_k} of {num_candidates} experts to select from. Give a "
            "top_k between 1 and that number (or a larger top_groups)."
        )


def _num_experts(name: str, array: jax.Array) -> int:
    """The size of the last dimension, which must exist."""
    checks.array("routing", name, array)
    if not array.shape:
        checks.shape("routing", name, array, ("tokens", "E"))
    return array.shape[-1]


def _masked_logits(logits: jax.Array, token_mask: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """float32 logits, 0 for masked tokens so that NaN there reaches no gradient; and the mask."""
    _num_experts("logits", logits)
    logits = logits.astype(jnp.float32)
    if token_mask is None:
        return logits, jnp.ones(logits.shape[:-1], jnp.bool_)
    if getattr(token_mask, "shape", None) != logits.shape[:-1]:  # equal sizes may be symbolic
        checks.shape("routing", "token_mask", token_mask, logits.shape[:-1])
    mask = token_mask.astype(jnp.bool_)  # integers are not summed
    return jnp.where(mask[..., None], logits, 0), mask


def _masked(routing: Routing, mask: jax.Array) -> Routing:
    mask = mask[..., None]
    return Routing(
        jnp.where(mask, routing.topk_ids, -1),
        jnp.where(mask, routing.topk_weights, 0),
        jnp.where(mask, routing.probabilities, 0),
    )


def _normalized(log_scores: jax.Array) -> jax.Array:
    """Scores over their sum, from their logarithms; zeros if all scores are 0."""
    scored = (log_scores != -jnp.inf).any(-1, keepdims=True)
    return jnp.where(scored, jax.nn.softmax(jnp.where(scored, log_scores, 0)), 0)


def _one_hot(ids: jax.Array, size: int) -> jax.Array:
    """bool[..., size]; all False for an id outside [0, size)."""
    return ids[..., None] == _along_last(jnp.arange(size), ids.ndim + 1)


def _along_last(vector: jax.Array, ndim: int) -> jax.Array:
    """The vector with leading dimensions of size 1, as jax_numpy_rank_promotion="raise" asks."""
    return jnp.expand_dims(vector, tuple(range(ndim - 1)))


def _sum_over(value: jax.Array, token_axes: AxisName | None) -> jax.Array:
    return value if token_axes is None else lax.psum(value, token_axes)
