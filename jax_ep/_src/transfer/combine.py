"""combine: send the experts' outputs back to their tokens' ranks and sum them there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep._src.core import checks, compat
from jax_ep._src.transfer.params import TransferParams
from jax_ep._src.transfer.plan import Plan, PlanArrays, params_along
from jax_ep._src.transfer.primitives import bind_combine, bind_redispatch
from jax_ep._src.transfer.weighted import check_unweighted


def combine(
    y: jax.Array,
    plan: Plan,
    row_weights: jax.Array | None,
    *,
    num_sms: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Sums each token's expert outputs, weighted, at the token's rank. Inside `jax.shard_map`.

    Each rank sums a token's rows over its own experts in float32, by fused multiply-adds in
    ascending k, and rounds the partial sum to y's dtype. The token's rank adds the partial sums in
    float32 in rank order and rounds once more, so the result does not depend on timing. If the plan
    has several NVLink domains, the sum of each is rounded to y's dtype first, and these are added
    in the order of domains. A token without any row gets zeros.

    In a `shard_map` over ``"expert"``::

        sent = jax_ep.dispatch(x, topk_ids, topk_weights, axis_name="expert", num_experts=16)
        y = sent.rows * 2  # the experts
        out = jax_ep.combine(y, sent.plan, sent.row_weights)

    Args:
      y: [M, H] bfloat16, float16 or float32, one output row for each row that `dispatch` returned.
        Padding and tail are not read.
      plan: the plan that `dispatch` returned with those rows.
      row_weights: [M] of any float dtype, usually those that `dispatch` returned; None if y was
        multiplied by them already, as `grouped_mlp` does when it is given weights. There is no
        default, because a forgotten weight would be a silent error.
      num_sms: the most SMs that the call uses on CUDA; None chooses.
      implementation: ``"cuda"``, ``"xla"``, or None to choose by platform, dtype and shapes.

    Returns:
      [T, H] in y's dtype.

    Raises:
      ArgumentError (a ValueError): shapes that are not the plan's, another mesh than the plan's,
        weights for an output of `grouped_mlp` that has them, or a call outside `shard_map`.
      DtypeError (a TypeError): a dtype not listed above.
      UnavailableError (a NotImplementedError): ``implementation="cuda"`` where it cannot run.
    """
    operands, params = check_combine(
        "combine", y, plan, row_weights, num_sms=num_sms, implementation=implementation
    )
    return checked_combine(*operands, params)


def check_combine(
    operation: str,
    y: jax.Array,
    plan: Plan,
    row_weights: jax.Array | None,
    *,
    num_sms: int | None,
    implementation: str | None,
) -> tuple[tuple[jax.Array, Plan, jax.Array | None], TransferParams]:
    """Returns the arguments of `checked_combine`, or raises."""
    params = params_along(operation, plan, num_sms, implementation)
    checks.rows(operation, "y", y, (params.num_rows, "hidden"))
    check_unweighted(operation, y, row_weights)
    if row_weights is not None:
        row_weights = checks.weights(operation, "row_weights", row_weights, (params.num_rows,))
    return compat.vary_together((y, plan, row_weights), params.axis.names), params


def checked_combine(
    y: jax.Array, plan: Plan, row_weights: jax.Array | None, params: TransferParams
) -> jax.Array:
    """Combines operands that are checked and vary together."""
    with jax.named_scope("jax_ep.combine"):
        return _combine(y, plan.arrays, row_weights, params)


# ---- derivative: a dispatch along the same plan


def _run(
    y: jax.Array, plan: PlanArrays, row_weights: jax.Array | None, params: TransferParams
) -> jax.Array:
    out, _ = bind_combine(y, plan, row_weights, None, params)
    return checkpoint_name(out, "jax_ep.combined")


def _combine_forward(
    y: jax.Array, plan: PlanArrays, row_weights: jax.Array | None, params: TransferParams
) -> Any:
    kept_y = None if row_weights is None else y
    # Not `_combine`: jax.checkpoint finds no names inside the call of a custom_vjp.
    return _run(y, plan, row_weights, params), (kept_y, plan, row_weights)


def _combine_backward(params: TransferParams, residuals: Any, out_bar: jax.Array) -> Any:
    y, plan, row_weights = residuals
    rows_bar, _ = bind_redispatch(out_bar, plan, None, params)
    return cotangents_of_rows(y, plan, row_weights, rows_bar)


def cotangents_of_rows(
    y: jax.Array | None, plan: PlanArrays, row_weights: jax.Array | None, rows_bar: jax.Array
) -> tuple[jax.Array, None, jax.Array | None]:
    """Returns the cotangents of y, plan and row weights from the sums', expanded into rows."""
    if y is None or row_weights is None:
        return rows_bar, None, None
    # y and the weights are not read in padding and tail, where rows_bar has the tail's value.
    is_real = plan.row_source[:, 0] >= 0
    wide_bar = rows_bar.astype(jnp.float32)
    y_bar = jnp.where(is_real, row_weights, 1)[:, None] * wide_bar
    weights_bar = jnp.sum(jnp.where(is_real[:, None], y.astype(jnp.float32), 0) * wide_bar, axis=1)
    return y_bar.astype(y.dtype), None, weights_bar


_combine = jax.custom_vjp(_run, nondiff_argnums=(3,))
_combine.defvjp(_combine_forward, _combine_backward)
