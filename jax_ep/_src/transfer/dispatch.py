"""dispatch: send every token to the ranks that hold its experts, in the grouped-matmul layout."""

from __future__ import annotations

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_ep._src.core import checks, compat
from jax_ep._src.core.expert_axis import AxisName
from jax_ep._src.quant.quantized import Quantized, as_bits, from_bits
from jax_ep._src.transfer.domains import check_domain_size, warn_of_dropless_rows
from jax_ep._src.transfer.params import TransferParams
from jax_ep._src.transfer.plan import Dispatched, Plan, PlanArrays, check_num_rows
from jax_ep._src.transfer.primitives import Rows, bind_combine, bind_dispatch
from jax_ep._src.transfer.quantized_rows import check_rows, cotangent


def dispatch(
    x: jax.Array | Quantized,
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
    num_sms: int | None = None,
    implementation: str | None = None,
) -> Dispatched:
    """Sends each token to the ranks that hold its experts. Call it inside `jax.shard_map`.

    R ranks, E experts of which L = E/R are local (expert e lives on rank e // L), T tokens per
    rank, K experts per token, H hidden size. Rows arrive in the order (local expert, source rank,
    token, k), so that ``rows`` and ``group_sizes`` feed `grouped_matmul` and `jax.lax.ragged_dot`.
    Dispatch is bit-exact, and its results do not depend on timing.

    By default nothing is dropped if each token's ids are distinct, because M covers the worst case,
    all tokens on one rank: R*T*min(K, L) + L*(row_align - 1), rounded up to `row_align`. When rows
    overflow a smaller capacity, every local expert gets the same cap, and within it every source
    rank the same quota. Each source's first rows are kept, ``plan.num_dropped`` counts the others,
    and the weights of the kept rows are not renormalized.

    In a `shard_map` over ``"expert"``::

        sent = jax_ep.dispatch(x, topk_ids, topk_weights, axis_name="expert", num_experts=16)
        y = jax_ep.grouped_mlp(sent.rows, w_up, w_down, sent.group_sizes)
        out = jax_ep.combine(y, sent.plan, sent.row_weights)

    Args:
      x: [T, H] bfloat16, float16 or float32, this rank's tokens; or a `quant.Quantized` of them,
        which has no derivative.
      topk_ids: int32[T, K], the experts of each token. -1 means not routed. Any other id outside
        [0, E) is treated like -1 and counted in ``plan.num_bad_ids``. If a token names an expert
        twice, that expert receives two rows.
      topk_weights: [T, K] of any float dtype, the routing weights, or None.
      num_experts: E, the experts of all ranks; a multiple of R.
      axis_name: the expert axis, or a tuple of mesh axes that form it together.
      capacity_factor: sets M to this multiple of T*K, a rank's even share of the rows, but to at
        least 1024 rows and at most the dropless number; room for `row_align` is added.
      recv_capacity: M itself, the rows that a rank can receive, padding included. Give either this
        or `capacity_factor`, or neither.
      row_align: pads each group to a multiple of this with zero rows; `group_sizes` counts them.
      zero_tail: whether rows past the last group are zeros, here and in later cotangents. False
        leaves them unspecified, which is faster and safe as long as only jax_ep's operations use
        the rows, because these never read the tail.
      nvlink_domain_size: how many consecutive ranks of the axis reach each other over NVLink, such
        as those of one host. A token then goes once to each domain that has some of its experts,
        which sends it on, and `combine` sums in each domain first. The plan remembers it. None, or
        R, is one level.
      num_sms: the most SMs that the call uses on CUDA; None chooses.
      implementation: ``"cuda"``, ``"xla"``, or None to choose by platform, dtype and shapes.

    Returns:
      `Dispatched`: rows [M, H], row_weights float32[M] (None without weights), group_sizes int32[L]
      and the plan for `combine` and `redispatch`.

    Raises:
      ArgumentError (a ValueError): shapes or values that do not fit, an unknown axis, or a call
        outside `shard_map`.
      DtypeError (a TypeError): a dtype not listed above.
      UnavailableError (a NotImplementedError): ``implementation="cuda"`` where it cannot run.
    """
    operands, params = check_dispatch(
        "dispatch",
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
    return checked_dispatch(*operands, params)


def check_dispatch(
    operation: str,
    x: jax.Array | Quantized,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
    *,
    num_experts: int,
    axis_name: AxisName,
    capacity_factor: float | None,
    recv_capacity: int | None,
    row_align: int,
    zero_tail: bool,
    nvlink_domain_size: int | None,
    num_sms: int | None,
    implementation: str | None,
) -> tuple[tuple[Rows, jax.Array, jax.Array | None], TransferParams]:
    """Returns the arguments of `checked_dispatch`, or raises."""
    axis = checks.expert_axis(operation, axis_name)
    num_experts = checks.num_experts(operation, num_experts, axis)
    sent = check_rows(operation, x, "tokens", axis)
    checks.topk_ids(operation, topk_ids, x.shape[0])
    if topk_weights is not None:
        topk_weights = checks.weights(operation, "topk_weights", topk_weights, topk_ids.shape)
    params = TransferParams(
        axis=axis,
        num_experts=num_experts,
        num_rows=check_num_rows(
            operation,
            topk_ids.shape,
            axis,
            num_experts,
            row_align=row_align,
            recv_capacity=recv_capacity,
            capacity_factor=capacity_factor,
        ),
        row_align=row_align,
        zero_tail=zero_tail,
        num_sms=checks.num_sms(operation, num_sms),
        implementation=checks.implementation(operation, implementation),
        domain_size=check_domain_size(operation, nvlink_domain_size, axis.size),
    )
    if recv_capacity is None and capacity_factor is None:
        warn_of_dropless_rows(operation, params, x)
    operands = compat.vary_together((sent, topk_ids, topk_weights), axis.names)
    return operands, params


def checked_dispatch(
    x: Rows, topk_ids: jax.Array, topk_weights: jax.Array | None, params: TransferParams
) -> Dispatched:
    """Dispatches operands that are checked and vary together; quantized rows come as bits."""
    with jax.named_scope("jax_ep.dispatch"):
        results = compat.without_tangents(_dispatch(x, topk_ids, topk_weights, params))
    return dispatched(*results, params)


def dispatched(
    rows: Rows, row_weights: jax.Array | None, arrays: PlanArrays, params: TransferParams
) -> Dispatched:
    """Returns the results as the user sees them; quantized rows come as bits."""
    plan = Plan(
        **arrays._asdict(),
        axis_name=params.axis.name,
        num_ranks=params.axis.size,
        num_experts=params.num_experts,
        row_align=params.row_align,
        zero_tail=params.zero_tail,
        nvlink_domain_size=params.domain_size,
    )
    return Dispatched(from_bits(rows), row_weights, plan.group_sizes, plan)


# ---- derivative: a combine along the same plan


def _run(
    x: Rows,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
    params: TransferParams,
) -> tuple[Rows, jax.Array | None, PlanArrays]:
    rows, row_weights, plan = bind_dispatch(from_bits(x), topk_ids, topk_weights, params)
    # Named inside the derivative, so that the residuals carry the names, too.
    rows, row_weights = checkpoint_name((as_bits(rows), row_weights), "jax_ep.rows")
    return rows, row_weights, checkpoint_name(plan, "jax_ep.plan")


def _dispatch_forward(
    x: Rows,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
    params: TransferParams,
) -> Any:
    # Not `_dispatch`: jax.checkpoint finds no names inside the call of a custom_vjp.
    results = _run(x, topk_ids, topk_weights, params)
    return results, results[2]


def _dispatch_backward(params: TransferParams, plan: PlanArrays, cotangents: Any) -> Any:
    rows_bar, row_weights_bar, _ = cotangents
    rows_bar, is_quantized = cotangent(rows_bar)
    x_bar, topk_weights_bar = bind_combine(rows_bar, plan, None, row_weights_bar, params)
    return None if is_quantized else x_bar, None, topk_weights_bar


_dispatch = jax.custom_vjp(_run, nondiff_argnums=(3,))
_dispatch.defvjp(_dispatch_forward, _dispatch_backward)
