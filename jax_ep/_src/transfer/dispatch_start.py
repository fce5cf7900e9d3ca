"""dispatch_start and dispatch_done: a dispatch that other work runs beside."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from jax_ep._src.core import compat
from jax_ep._src.core.errors import DtypeError
from jax_ep._src.core.expert_axis import AxisName
from jax_ep._src.quant.quantized import Quantized
from jax_ep._src.transfer.dispatch import check_dispatch, dispatched
from jax_ep._src.transfer.gradients_in_flight import sums_done, sums_start
from jax_ep._src.transfer.in_flight import InFlight, Link, check_in_flight, check_lane
from jax_ep._src.transfer.params import TransferParams
from jax_ep._src.transfer.plan import Dispatched, PlanArrays
from jax_ep._src.transfer.start_primitives import as_buffers, bind_done, bind_start


def dispatch_start(
    x: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
    *,
    num_experts: int,
    axis_name: AxisName,
    capacity_factor: float | None = None,
    recv_capacity: int | None = None,
    row_align: int = 1,
    zero_tail: bool = True,
    nvlink_domain_size: int | None = None,
    lane: int = 1,
    num_sms: int | None = None,
    implementation: str | None = None,
) -> InFlight:
    """Starts a `dispatch`, which `dispatch_done` ends. Call it inside `jax.shard_map`.

    What `overlap` puts between them runs at the same time. Both belong in the same jit-compiled
    function, and in the same iteration of a loop: XLA copies what a program returns and what a loop
    carries, and done ends with an error if it finds a copy. Neither is captured in CUDA graphs.
    Under `jax.vmap`, and on CPUs, the transfer is over before start returns. The results have the
    bits of `dispatch`. In the backward pass the transfer of the gradient starts at done and ends at
    start, with the gradient of what is between them meanwhile.

    In a `shard_map` over ``"expert"``::

        sending = jax_ep.dispatch_start(
            x, topk_ids, topk_weights, axis_name="expert", num_experts=16
        )
        sent = jax_ep.dispatch_done(sending)
        out = jax_ep.combine(sent.rows, sent.plan, sent.row_weights)

    Args:
      x: [T, H], as in `dispatch`, but not quantized.
      topk_ids: int32[T, K], as in `dispatch`.
      topk_weights: [T, K] or None, as in `dispatch`.
      num_experts: as in `dispatch`.
      axis_name: as in `dispatch`.
      capacity_factor: as in `dispatch`.
      recv_capacity: as in `dispatch`.
      row_align: as in `dispatch`.
      zero_tail: as in `dispatch`.
      nvlink_domain_size: as in `dispatch`.
      lane: 1 to 3. Transfers in flight in one lane run one after another, those of different lanes
        at the same time. All ranks start the transfers of a lane in the same order. Each lane has
        buffers of its own, as large as those of other transfers.
      num_sms: the most SMs that the transfer uses on CUDA; None chooses. They are a quarter of all
        at most, and 16 over NVLink domains.
      implementation: as in `dispatch`.

    Returns:
      `InFlight`, for `overlap` and `dispatch_done`.

    Raises:
      ArgumentError (a ValueError), DtypeError (a TypeError), UnavailableError (a
        NotImplementedError): as `dispatch`, and for another lane.
    """
    if isinstance(x, Quantized):
        raise DtypeError(
            "jax_ep.dispatch_start: x is quantized; expected an array of floats. Send quantized "
            "rows by jax_ep.dispatch."
        )
    operands, params = check_dispatch(
        "dispatch_start",
        x,
        topk_ids,
        topk_weights,
        num_experts=num_experts,
        axis_name=axis_name,
        capacity_factor=capacity_factor,
        recv_capacity=recv_capacity,
        row_align=row_align,
        zero_tail=zero_tail,
        nvlink_domain_size=nvlink_domain_size,
        num_sms=num_sms,
        implementation=implementation,
    )
    rows: Any = operands[0]  # an array, as x is
    params = params.in_flight(check_lane("dispatch_start", lane))
    return checked_dispatch_start(rows, *operands[1:], params)


def checked_dispatch_start(
    x: jax.Array, topk_ids: jax.Array, topk_weights: jax.Array | None, params: TransferParams
) -> InFlight:
    """Starts with operands that are checked and vary together, in a lane in flight."""
    with jax.named_scope("jax_ep.dispatch_start"):
        link = Link()
        operands, results = _start(x, topk_ids, topk_weights, params, link)
    return InFlight(operands, results, "dispatch", params, link)


def dispatch_done(in_flight: InFlight) -> Dispatched:
    """Returns the results of a dispatch that `dispatch_start` has started, once they are there.

    In a `shard_map` over ``"expert"``::

        sending = jax_ep.dispatch_start(
            x, topk_ids, topk_weights, axis_name="expert", num_experts=16
        )
        sent = jax_ep.dispatch_done(sending)
        out = jax_ep.combine(sent.rows, sent.plan, sent.row_weights)

    Args:
      in_flight: what `dispatch_start` or `overlap` returned.

    Returns:
      `Dispatched`, as `dispatch`.

    Raises:
      DtypeError (a TypeError): in_flight is something else.
      ArgumentError (a ValueError): it is another transfer.
    """
    check_in_flight("dispatch_done", in_flight, "dispatch")
    with jax.named_scope("jax_ep.dispatch_done"):
        results = _done(in_flight.operands, in_flight.results, in_flight.params, in_flight.link)
        results = compat.without_tangents(results)
    return dispatched(*results, in_flight.params)


# ---- derivatives: a combine along the same plan, which starts at done and ends at start

_Operands = tuple[jax.Array, jax.Array, jax.Array | None]  # x, topk_ids, topk_weights
_Results = tuple[jax.Array, jax.Array | None, PlanArrays]  # rows, row_weights, plan


def _run_start(
    x: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
    params: TransferParams,
    _: Link,
) -> tuple[_Operands, _Results]:
    operands = as_buffers((x, topk_ids, topk_weights))
    rows, *others = bind_start("dispatch", jax.tree.leaves(operands), params)
    row_weights = None if topk_weights is None else others.pop(0)
    return operands, (rows, row_weights, PlanArrays.split(others, params)[0])


def _start_forward(*arguments: Any) -> Any:
    return _run_start(*arguments), None


def _start_backward(params: TransferParams, link: Link, _: None, cotangents: Any) -> Any:
    # The operands' cotangents are in flight, and the results' are what they are made of.
    (x_bar, _, topk_weights_bar), (rows_bar, row_weights_bar, _) = cotangents
    results = jax.tree.leaves((x_bar, topk_weights_bar))
    returning = InFlight((rows_bar, link.take(), row_weights_bar), results, "combine", params, None)
    x_bar, topk_weights_bar = sums_done(returning)
    return x_bar, None, topk_weights_bar


def _run_done(operands: _Operands, results: _Results, params: TransferParams, _: Link) -> _Results:
    rows, row_weights, plan = results
    arrays, tree = jax.tree.flatten((rows, row_weights))
    joined = bind_done(
        "dispatch", arrays, jax.tree.leaves(operands), params, plan=jax.tree.leaves(plan)
    )
    joined, plan = lax.optimization_barrier((joined, plan))  # nothing reads the plan before
    rows, row_weights = jax.tree.unflatten(tree, joined)
    return rows, row_weights, plan


def _done_forward(*arguments: Any) -> Any:
    joined = _run_done(*arguments)
    return joined, joined[2]


def _done_backward(params: TransferParams, link: Link, plan: PlanArrays, cotangents: Any) -> Any:
    rows_bar, row_weights_bar, _ = cotangents
    returning = sums_start(rows_bar, plan, row_weights_bar, params)
    rows_bar, plan, row_weights_bar = returning.operands
    link.give(plan)
    x_bar, *weights_bar = returning.results
    operands_bar = x_bar, None, weights_bar[0] if weights_bar else None
    return operands_bar, (rows_bar, row_weights_bar, None)


_start = jax.custom_vjp(_run_start, nondiff_argnums=(3, 4))
_start.defvjp(_start_forward, _start_backward)
_done = jax.custom_vjp(_run_done, nondiff_argnums=(2, 3))
_done.defvjp(_done_forward, _done_backward)
