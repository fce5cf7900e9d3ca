"""combine_start and combine_done: a combine that other work runs beside."""

from __future__ import annotations

from typing import Any

import jax

from jax_ep._src.transfer.combine import check_combine, cotangents_of_rows
from jax_ep._src.transfer.gradients_in_flight import redispatch_done, redispatch_start
from jax_ep._src.transfer.in_flight import InFlight, Link, check_in_flight, check_lane
from jax_ep._src.transfer.params import TransferParams
from jax_ep._src.transfer.plan import Plan, PlanArrays
from jax_ep._src.transfer.start_primitives import as_buffers, bind_done, bind_start


def combine_start(
    y: jax.Array,
    plan: Plan,
    row_weights: jax.Array | None,
    *,
    lane: int = 1,
    num_sms: int | None = None,
    implementation: str | None = None,
) -> InFlight:
    """Starts a `combine`, which `combine_done` ends. Call it inside `jax.shard_map`.

    All that `dispatch_start` says about a transfer in flight is true of this one.

    In a `shard_map` over ``"expert"``::

        sent = jax_ep.dispatch(x, topk_ids, topk_weights, axis_name="expert", num_experts=16)
        returning = jax_ep.combine_start(sent.rows, sent.plan, sent.row_weights)
        returning, shared = jax_ep.overlap(returning, lambda x: x @ x.T @ x, x)
        out = jax_ep.combine_done(returning) + shared

    Args:
      y: [M, H], as in `combine`.
      plan: as in `combine`.
      row_weights: [M] or None, as in `combine`.
      lane: 1 to 3, as in `dispatch_start`.
      num_sms: as in `dispatch_start`.
      implementation: as in `combine`.

    Returns:
      `InFlight`, for `overlap` and `combine_done`.

    Raises:
      ArgumentError (a ValueError), DtypeError (a TypeError), UnavailableError (a
        NotImplementedError): as `combine`, and for another lane.
    """
    operands, params = check_combine(
        "combine_start", y, plan, row_weights, num_sms=num_sms, implementation=implementation
    )
    return checked_combine_start(*operands, params.in_flight(check_lane("combine_start", lane)))


def checked_combine_start(
    y: jax.Array, plan: Plan, row_weights: jax.Array | None, params: TransferParams
) -> InFlight:
    """Starts with operands that are checked and vary together, in a lane in flight."""
    with jax.named_scope("jax_ep.combine_start"):
        link = Link()
        operands, result = _start(y, plan.arrays, row_weights, params, link)
    return InFlight(operands, result, "combine", params, link)


def combine_done(in_flight: InFlight) -> jax.Array:
    """Returns the result of a combine that `combine_start` has started, once it is there.

    In a `shard_map` over ``"expert"``::

        sent = jax_ep.dispatch(x, topk_ids, topk_weights, axis_name="expert", num_experts=16)
        returning = jax_ep.combine_start(sent.rows, sent.plan, sent.row_weights)
        out = jax_ep.combine_done(returning)

    Args:
      in_flight: what `combine_start` or `overlap` returned.

    Returns:
      [T, H] in the dtype of the rows, as `combine`.

    Raises:
      DtypeError (a TypeError): in_flight is something else.
      ArgumentError (a ValueError): it is another transfer.
    """
    check_in_flight("combine_done", in_flight, "combine")
    with jax.named_scope("jax_ep.combine_done"):
        return _done(in_flight.operands, in_flight.results, in_flight.params, in_flight.link)


# ---- derivatives: a redispatch along the same plan, which starts at done and ends at start

_Operands = tuple[jax.Array, PlanArrays, jax.Array | None]  # y, plan, row_weights


def _flags(row_weights: jax.Array | None) -> dict[str, bool]:
    return {"has_weights": row_weights is not None, "has_scalars": False}


def _run_start(
    y: jax.Array,
    plan: PlanArrays,
    row_weights: jax.Array | None,
    params: TransferParams,
    _: Link,
) -> tuple[_Operands, jax.Array]:
    operands = as_buffers((y, plan, row_weights))
    (out,) = bind_start("combine", jax.tree.leaves(operands), params, **_flags(row_weights))
    return operands, out


def _start_forward(
    y: jax.Array,
    plan: PlanArrays,
    row_weights: jax.Array | None,
    params: TransferParams,
    link: Link,
) -> Any:
    operands, out = _run_start(y, plan, row_weights, params, link)
    kept_y = None if row_weights is None else y
    return (operands, out), (kept_y, plan, row_weights)


def _start_backward(params: TransferParams, link: Link, residuals: Any, cotangents: Any) -> Any:
    # y's cotangent is in flight, and that of the result is what it is made of.
    y, plan, row_weights = residuals
    (rows_bar, *_), out_bar = cotangents
    returning = InFlight((out_bar, link.take()), [rows_bar], "redispatch", params, None)
    rows_bar = redispatch_done(returning)
    return cotangents_of_rows(y, plan, row_weights, rows_bar)


def _run_done(operands: _Operands, out: jax.Array, params: TransferParams, _: Link) -> jax.Array:
    flags = _flags(operands[2])
    (done,) = bind_done("combine", [out], jax.tree.leaves(operands), params, plan=(), **flags)
    return done


def _done_forward(operands: _Operands, out: jax.Array, params: TransferParams, link: Link) -> Any:
    return _run_done(operands, out, params, link), operands[1]


def _done_backward(params: TransferParams, link: Link, plan: PlanArrays, out_bar: jax.Array) -> Any:
    returning = redispatch_start(out_bar, plan, params)
    out_bar, plan = returning.operands
    link.give(plan)
    return (returning.results[0], None, None), out_bar


_start = jax.custom_vjp(_run_start, nondiff_argnums=(3, 4))
_start.defvjp(_start_forward, _start_backward)
_done = jax.custom_vjp(_run_done, nondiff_argnums=(2, 3))
_done.defvjp(_done_forward, _done_backward)
