"""The load of the experts, the losses that spread it, and the bias that does without one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep._src.core import checks
from jax_ep._src.core.expert_axis import AxisName
from jax_ep._src.routing.routers import masked_logits
from jax_ep._src.routing.selection import num_experts_of, one_hot


def load(topk_ids: jax.Array, num_experts: int, *, token_axes: AxisName | None = None) -> jax.Array:
    """Counts the assignments to each expert.

    For example::

        counts = jax_ep.routing.load(topk_ids, 16)

    Args:
      topk_ids: i32[..., K]. Ids outside [0, E) are not counted.
      num_experts: E.
      token_axes: inside `shard_map`, the mesh axes over which the tokens are sharded, so that the
        counts are those of all tokens.

    Returns:
      i32[E].
    """
    checks.array("routing", "topk_ids", topk_ids)
    hits = one_hot(topk_ids.reshape(-1), num_experts)
    return _sum_over(hits.sum(0, dtype=jnp.int32), token_axes)


def load_fractions(counts: jax.Array) -> jax.Array:
    """Returns `load` as shares of all assignments: f32[..., E], of sum 1, or zeros without any.

    For example::

        shares = jax_ep.routing.load_fractions(jax_ep.routing.load(topk_ids, 16))
    """
    num_experts_of("counts", counts)
    counts = counts.astype(jnp.float32)
    total = counts.sum(-1, keepdims=True)
    return counts / jnp.where(total > 0, total, 1)  # means of several loads may be below 1


def balancing_loss(
    probabilities: jax.Array, topk_ids: jax.Array, *, token_axes: AxisName | None = None
) -> jax.Array:
    """E * sum_e f_e P_e (GShard, arXiv:2006.16668; Switch Transformer, arXiv:2101.03961).

    f_e is expert e's share of the assignments, and P_e its mean probability over the routed tokens.
    The loss is 1 when the load is even and at most E, and gradients flow through P only.

    For example::

        ids, _, probabilities = jax_ep.routing.softmax_topk(x @ router, top_k=2)
        loss = 0.01 * jax_ep.routing.balancing_loss(probabilities, ids)

    Args:
      probabilities: float[..., E], those of a `Routing`.
      topk_ids: i32[..., K]. Tokens without any id >= 0 count neither in f nor in P.
      token_axes: inside `shard_map`, the mesh axes over which the tokens are sharded. f and P are
        then those of all tokens, so the loss does not depend on how they are sharded.

    Returns:
      f32[].

    Raises:
      ArgumentError: `probabilities` and `topk_ids` are not of the same tokens.
    """
    num_experts = num_experts_of("probabilities", probabilities)
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

    For example::

        loss = 1e-3 * jax_ep.routing.z_loss(x @ router)

    Args:
      logits: float[..., E].
      token_mask: bool[...], False for tokens that do not count.
      token_axes: as in `balancing_loss`.

    Returns:
      f32[].
    """
    logits, mask = masked_logits(logits, token_mask)
    squares = jnp.square(jax.nn.logsumexp(logits, axis=-1))
    num_tokens = _sum_over(mask.sum(dtype=jnp.float32), token_axes)
    return _sum_over(jnp.where(mask, squares, 0).sum(), token_axes) / jnp.maximum(num_tokens, 1)


def updated_bias(bias: jax.Array, counts: jax.Array, *, rate: float = 1e-3) -> jax.Array:
    """Returns the next selection bias: up for experts below the mean load, down for those above.

    This is loss-free balancing (arXiv:2408.15664). Call it once per step, outside the gradient.

    For example::

        counts = jax_ep.routing.load(topk_ids, 16)
        bias = jax_ep.routing.updated_bias(jnp.zeros(16), counts)

    Args:
      bias: float[..., E], as given to a router; leading dimensions are stacked layers.
      counts: i32[..., E], the step's `load`.
      rate: the size of a step, in units of the router's scores.

    Returns:
      float[..., E], of bias's dtype.

    Raises:
      ArgumentError: `bias` and `counts` have different shapes.
    """
    num_experts = num_experts_of("bias", bias)
    checks.shape("routing", "counts", counts, bias.shape)
    counts = counts.astype(jnp.float32)
    # Multiplied, because XLA rounds a mean: an expert at the mean stays where it is.
    below = jnp.sign(counts.sum(-1, keepdims=True) - num_experts * counts)
    return bias + (rate * below).astype(bias.dtype)


def _sum_over(value: jax.Array, token_axes: AxisName | None) -> jax.Array:
    return value if token_axes is None else lax.psum(value, token_axes)
