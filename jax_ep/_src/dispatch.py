"""dispatch: send every token to the ranks that hold its experts, in the grouped-matmul layout."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep._src import compat, primitive, runtime, transfer
from jax_ep._src.errors import ArgumentError, DtypeError
from jax_ep._src.mesh import AxisName, ExpertAxis, expert_axis
from jax_ep._src.plan import Dispatched, Plan, PlanArrays
from jax_ep._src.transfer import TransferParams


def dispatch(
    x: jax.Array,
    topk_ids: jax.Array | None,
    topk_weights: jax.Array | None,
    *,
    num_experts: int,
    axis_name: AxisName,
    recv_capacity: int | None = None,
    row_align: int = 1,
    plan: Plan | None = None,
    zero_tail: bool = True,
    num_sms: int | None = None,
    implementation: str | None = None,
) -> Dispatched:
    """Sends each token to the ranks that hold its experts. Call it inside `jax.shard_map`.

    R ranks, E experts of which L = E/R are local (expert e lives on rank e // L), T tokens a rank,
    K choices a token, H hidden. Rows arrive in the order (local expert, source rank, token,
    choice), so that ``rows`` and ``group_sizes`` feed `grouped_matmul` and `jax.lax.ragged_dot`.
    Dispatch is bit-exact, and its results do not depend on timing.

    Args:
      x: [T, H] bfloat16, float16 or float32, this rank's tokens.
      topk_ids: int32[T, K], the experts chosen. -1 means not routed; another id outside [0, E) is
        treated so and counted in ``plan.num_bad_ids``. Repeats within a token make a row each.
        With `plan` it is not used and may be None.
      topk_weights: [T, K] of any float dtype, the routing weights, or None.
      num_experts: E, the experts of all ranks; a multiple of R.
      axis_name: the expert axis, or a tuple of mesh axes that are it together.
      recv_capacity: M, the rows this rank can receive, padding included. None is dropless for ids
        distinct within a token: R*T*min(K, L) + L*(row_align - 1), rounded up to `row_align`. On
        overflow every local expert gets the same cap, and within it every source rank the same
        quota; a source's first rows are kept, ``plan.num_dropped`` counts the others, and weights
        are not renormalised.
      row_align: pads each group to a multiple of this with zero rows; `group_sizes` counts them.
      plan: an earlier dispatch's plan, to send other tokens along the same routes without
        exchanging metadata.
      zero_tail: whether the rows past the last group (and their cotangents in what follows) are
        zeros. False leaves them unspecified, which is faster; no jax_ep operation reads them.
      num_sms: the most streaming multiprocessors to use on CUDA; None chooses.
      implementation: ``"cuda"``, ``"xla"``, or None to choose by platform, dtype and shapes.

    Returns:
      `Dispatched`: rows [M, H], row_weights float32[M] (None without weights), group_sizes int32[L]
      and the plan for `combine`.

    Raises:
      ArgumentError (a ValueError): shapes or values that do not fit, an unknown axis, or a call
        outside `shard_map`.
      DtypeError (a TypeError): a dtype not listed above.
      UnavailableError (a NotImplementedError): ``implementation="cuda"`` where it cannot run.
    """
    axis = expert_axis("dispatch", axis_name)
    primitive.check_shape("dispatch", "x", x.shape, ("tokens", "hidden"))
    primitive.check_row_dtype("dispatch", "x", x.dtype)
    _check_experts(num_experts, axis)
    routing: jax.Array | PlanArrays
    if plan is not None:
        _check_plan(plan, axis, num_experts, x.shape[0], recv_capacity, row_align)
        routing, top_k, row_align = plan.arrays, plan.kept.shape[1], plan.row_align
        num_rows = plan.row_source.shape[0]
    else:
        routing = _check_ids(topk_ids, x)
        top_k = routing.shape[1]
        num_rows = _num_rows(x.shape[0], top_k, axis.size, num_experts, row_align, recv_capacity)
    if topk_weights is not None:
        topk_weights = primitive.check_weights(
            "dispatch", "topk_weights", topk_weights, (x.shape[0], top_k)
        )
    params = TransferParams(
        axis=axis,
        num_experts=num_experts,
        num_rows=num_rows,
        row_align=row_align,
        zero_tail=zero_tail,
        num_sms=primitive.check_num_sms("dispatch", num_sms),
        implementation=runtime.resolve_implementation("dispatch", implementation),
    )
    x, routing, topk_weights = compat.vary_together((x, routing, topk_weights), axis.names)
    with jax.named_scope("jax_ep.dispatch"):
        rows, row_weights, arrays = _dispatch(x, routing, topk_weights, params)
    plan = Plan(
        *arrays,
        axis_name=axis.name,
        num_ranks=axis.size,
        num_experts=num_experts,
        row_align=row_align,
        zero_tail=zero_tail,
    )
    return Dispatched(rows, row_weights, plan.group_sizes, plan)


def mask_tail(rows: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """`rows` with zeros past the sum of `group_sizes`, in its values and in its cotangents.

    For code between `dispatch(..., zero_tail=False)` and `combine` that would read the tail.

    Args:
      rows: [M, ...].
      group_sizes: int32[L].
    """
    in_groups = jnp.arange(rows.shape[0]) < group_sizes.sum()
    return jnp.where(in_groups.reshape(-1, *(1,) * (rows.ndim - 1)), rows, 0)


# ---- checks


def _check_experts(num_experts: int, axis: ExpertAxis) -> None:
    if num_experts < 1 or num_experts % axis.size:
        padded = max(1, -(-num_experts // axis.size)) * axis.size
        raise ArgumentError(
            f"jax_ep.dispatch: num_experts={num_experts} does not divide over the {axis.size} "
            f"ranks of axis {axis.name!r}; expected a positive multiple of {axis.size}. Pad the "
            f"expert weights to {padded} experts; an id that the router never gives costs nothing."
        )


def _check_ids(topk_ids: jax.Array | None, x: jax.Array) -> jax.Array:
    if topk_ids is None:
        raise ArgumentError(
            "jax_ep.dispatch: topk_ids is None and there is no plan; expected int32[tokens, "
            "choices]. Give the router's ids, or an earlier dispatch's plan."
        )
    primitive.check_shape("dispatch", "topk_ids", topk_ids.shape, (x.shape[0], "choices"))
    if topk_ids.shape[1] < 1:
        raise ArgumentError(
            f"jax_ep.dispatch: topk_ids has shape {topk_ids.shape}; expected at least one choice a "
            "token. Mark tokens that have none by an id of -1."
        )
    if topk_ids.dtype != jnp.int32:
        raise DtypeError(
            f"jax_ep.dispatch: topk_ids has dtype {topk_ids.dtype}; expected int32. "
            "Cast it with topk_ids.astype(jnp.int32)."
        )
    return topk_ids


def _num_rows(
    num_tokens: int,
    top_k: int,
    num_ranks: int,
    num_experts: int,
    row_align: int,
    recv_capacity: int | None,
) -> int:
    if row_align < 1:
        raise ArgumentError(
            f"jax_ep.dispatch: row_align={row_align}; expected 1 or more. Use 1 for no padding."
        )
    if recv_capacity is None:
        num_local = num_experts // num_ranks
        dropless = num_ranks * num_tokens * min(top_k, num_local) + num_local * (row_align - 1)
        return -(-dropless // row_align) * row_align
    if recv_capacity < 1:
        raise ArgumentError(
            f"jax_ep.dispatch: recv_capacity={recv_capacity}; expected 1 or more rows. "
            "Use None to drop nothing."
        )
    return recv_capacity


def _check_plan(
    plan: Plan,
    axis: ExpertAxis,
    num_experts: int,
    num_tokens: int,
    recv_capacity: int | None,
    row_align: int,
) -> None:
    given = {
        "axis_name": axis.name,
        "num_ranks": axis.size,
        "num_experts": num_experts,
        "tokens": num_tokens,
        "recv_capacity": recv_capacity or plan.row_source.shape[0],
        "row_align": plan.row_align if row_align == 1 else row_align,
    }
    planned = {
        "axis_name": plan.axis_name,
        "num_ranks": plan.num_ranks,
        "num_experts": plan.num_experts,
        "tokens": plan.kept.shape[0],
        "recv_capacity": plan.row_source.shape[0],
        "row_align": plan.row_align,
    }
    for name, value in given.items():
        if value != planned[name]:
            raise ArgumentError(
                f"jax_ep.dispatch: {name} is {value!r} in this call; expected {planned[name]!r}, "
                "as in the plan. Call without plan= to route anew."
            )


# ---- derivative: a combine along the same plan


def _run(
    x: jax.Array,
    routing: jax.Array | PlanArrays,
    topk_weights: jax.Array | None,
    params: TransferParams,
) -> tuple[jax.Array, jax.Array | None, PlanArrays]:
    if isinstance(routing, PlanArrays):
        plan = routing
        rows, row_weights = transfer.bind_redispatch(x, plan, topk_weights, params)
    else:
        rows, row_weights, plan = transfer.bind_dispatch(x, routing, topk_weights, params)
    # Named in here, so that what the backward pass keeps carries the names, too.
    rows, row_weights = checkpoint_name((rows, row_weights), "jax_ep.rows")
    return rows, row_weights, checkpoint_name(plan, "jax_ep.plan")


def _dispatch_forward(
    x: jax.Array,
    routing: jax.Array | PlanArrays,
    topk_weights: jax.Array | None,
    params: TransferParams,
) -> Any:
    # Not `_dispatch`: jax.checkpoint finds no names inside the call of a custom_vjp.
    results = _run(x, routing, topk_weights, params)
    return results, results[2]


def _dispatch_backward(params: TransferParams, plan: PlanArrays, cotangents: Any) -> Any:
    rows_bar, row_weights_bar, _ = cotangents
    x_bar, topk_weights_bar = transfer.bind_combine(rows_bar, plan, None, row_weights_bar, params)
    return x_bar, None, topk_weights_bar


_dispatch = jax.custom_vjp(_run, nondiff_argnums=(3,))
_dispatch.defvjp(_dispatch_forward, _dispatch_backward)
