"""Selection: the K best experts of each token, within groups or without."""

from __future__ import annotations

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep._src.core import checks
from jax_ep._src.core.errors import ArgumentError

GroupScore = Literal["top2", "max"]
"""How a group of experts is rated: by the sum of its two best scores, or by its best one."""


def select(
    scores: jax.Array,
    top_k: int,
    *,
    bias: jax.Array | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: GroupScore = "top2",
) -> jax.Array:
    """Returns the ids of the K best experts, best first. No gradient flows through the selection.

    The two best experts of the better half::

        ids = jax_ep.routing.select(x @ router, 2, num_groups=2, top_groups=1)

    Args:
      scores: float[..., E].
      top_k: K.
      bias: float[E], added to the scores for the selection only. The weights stay those of the
        unbiased scores, so balancing by bias needs no loss (arXiv:2408.15664; see `updated_bias`).
      num_groups: the number of groups that neighboring experts form, e.g. one per node.
      top_groups: selects only from this many groups, the best ones. It bounds the number of ranks
        or nodes a token is sent to.
      group_score: what ranks the groups: ``"top2"``, the sum of a group's two best scores with bias
        (DeepSeek-V3), or ``"max"``, its best score with bias (DeepSeek-V2).

    Returns:
      i32[..., K].

    Raises:
      ArgumentError: K, `num_groups` and `top_groups` do not fit the number of experts, or another
        `group_score`.
      DtypeError: K is not an int.
    """
    num_experts = num_experts_of("scores", scores)
    check_selection(num_experts, top_k, num_groups, top_groups)
    if group_score not in get_args(GroupScore):
        raise ArgumentError(
            f"jax_ep.routing: group_score={group_score!r}; expected one of {get_args(GroupScore)}. "
            "Give 'top2' for DeepSeek-V3's groups, 'max' for DeepSeek-V2's."
        )
    scores = scores.astype(jnp.float32)
    if bias is not None:
        checks.shape("routing", "bias", bias, (num_experts,))
        scores = scores + _along_last(bias.astype(jnp.float32), scores.ndim)
    # Numbers rank above NaN, and NaN above the experts of groups that are not selected (-inf).
    lowest = float(jnp.finfo(jnp.float32).min)
    scores = jnp.nan_to_num(lax.stop_gradient(scores), nan=lowest, neginf=lowest, posinf=-lowest)
    if top_groups < num_groups:
        grouped = scores.reshape(*scores.shape[:-1], num_groups, num_experts // num_groups)
        num_summed = 1 if group_score == "max" else min(2, grouped.shape[-1])
        group_scores = lax.top_k(grouped, num_summed)[0].sum(-1)
        groups = lax.top_k(group_scores, top_groups)[1]
        selected = one_hot(groups, num_groups).any(-2)
        scores = jnp.where(selected[..., None], grouped, -jnp.inf).reshape(scores.shape)
    return lax.top_k(scores, top_k)[1].astype(jnp.int32)


def check_selection(num_experts: int, top_k: int, num_groups: int, top_groups: int) -> None:
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


def num_experts_of(name: str, array: jax.Array) -> int:
    """The size of the last dimension, which must exist."""
    checks.array("routing", name, array)
    if not array.shape:
        checks.shape("routing", name, array, ("tokens", "E"))
    return array.shape[-1]


def one_hot(ids: jax.Array, size: int) -> jax.Array:
    """bool[..., size]; all False for an id outside [0, size)."""
    return ids[..., None] == _along_last(jnp.arange(size), ids.ndim + 1)


def _along_last(vector: jax.Array, ndim: int) -> jax.Array:
    """The vector with leading dimensions of size 1, as jax_numpy_rank_promotion="raise" asks."""
    return jnp.expand_dims(vector, tuple(range(ndim - 1)))
