"""redispatch: send other tokens along the routes of an earlier dispatch, without metadata."""

from __future__ import annotations

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_ep._src.core import checks, compat
from jax_ep._src.quant.quantized import Quantized, as_bits, from_bits
from jax_ep._src.transfer.params import TransferParams
from jax_ep._src.transfer.plan import Dispatched, Plan, PlanArrays, params_along
from jax_ep._src.transfer.primitives import Rows, bind_combine, bind_redispatch
from jax_ep._src.transfer.quantized_rows import check_rows, cotangent


def redispatch(
    x: jax.Array | Quantized,
    plan: Plan,
    topk_weights: jax.Array | None = None,
    *,
    num_sms: int | None = None,
    implementation: str | None = None,
) -> Dispatched:
    """Sends tokens along the routes of `plan`. Call it inside `jax.shard_map`.

    It returns the rows that `dispatch` would return for the plan's ids, capacity, alignment and
    tail, without exchanging metadata again.

    In a `shard_map` over ``"expert"``::

        sent = jax_ep.dispatch(x, topk_ids, None, axis_name="expert", num_experts=16)
        squares = jax_ep.redispatch(x**2, sent.plan).rows

    Args:
      x: [T, H] bfloat16, float16 or float32, this rank's tokens, as many as the plan was made for;
        or a `quant.Quantized` of them, as in `dispatch`.
      plan: an earlier dispatch's plan.
      topk_weights: [T, K] of any float dtype, the routing weights, or None.
      num_sms: the most SMs that the call uses on CUDA; None chooses.
      implementation: ``"cuda"``, ``"xla"``, or None to choose by platform, dtype and shapes.

    Returns:
      `Dispatched` with the same plan.

    Raises:
      ArgumentError (a ValueError): shapes that are not the plan's, another mesh than the plan's, or
        a call outside `shard_map`.
      DtypeError (a TypeError): a dtype not listed above.
      UnavailableError (a NotImplementedError): ``implementation="cuda"`` where it cannot run.
    """
    params = params_along("redispatch", plan, num_sms, implementation)
    num_tokens, top_k = plan.kept.shape
    sent = check_rows("redispatch", x, num_tokens, params.axis)
    if topk_weights is not None:
        topk_weights = checks.weights(
            "redispatch", "topk_weights", topk_weights, (num_tokens, top_k)
        )
    sent, plan, topk_weights = compat.vary_together((sent, plan, topk_weights), params.axis.names)
    return checked_redispatch(sent, plan, topk_weights, params)


def checked_redispatch(
    x: Rows, plan: Plan, topk_weights: jax.Array | None, params: TransferParams
) -> Dispatched:
    """Redispatches operands that are checked and vary together; quantized rows come as bits."""
    with jax.named_scope("jax_ep.redispatch"):
        results = _redispatch(x, plan.arrays, topk_weights, params)
        rows, row_weights = compat.without_tangents(results)
    return Dispatched(from_bits(rows), row_weights, plan.group_sizes, plan)


# ---- derivative: a combine along the same plan


def _run(
    x: Rows, plan: PlanArrays, topk_weights: jax.Array | None, params: TransferParams
) -> tuple[Rows, jax.Array | None]:
    results = bind_redispatch(from_bits(x), plan, topk_weights, params)
    return checkpoint_name(as_bits(results), "jax_ep.rows")


def _redispatch_forward(
    x: Rows, plan: PlanArrays, topk_weights: jax.Array | None, params: TransferParams
) -> Any:
    # Not `_redispatch`: jax.checkpoint finds no names inside the call of a custom_vjp.
    return _run(x, plan, topk_weights, params), plan


def _redispatch_backward(params: TransferParams, plan: PlanArrays, cotangents: Any) -> Any:
    rows_bar, row_weights_bar = cotangents
    rows_bar, is_quantized = cotangent(rows_bar)
    x_bar, topk_weights_bar = bind_combine(rows_bar, plan, None, row_weights_bar, params)
    return None if is_quantized else x_bar, None, topk_weights_bar


_redispatch = jax.custom_vjp(_run, nondiff_argnums=(3,))
_redispatch.defvjp(_redispatch_forward, _redispatch_backward)
