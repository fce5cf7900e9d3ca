"""The part of moe_mlp between its arguments and combine: dispatch, and the local experts.

With ``remat="dispatch"`` its derivative sends x again along the plan rather than keep the rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jax_ep._src.dispatch import dispatch
from jax_ep._src.epilogue_mlp import epilogue_mlp, epilogue_mlp_backward, epilogue_mlp_forward
from jax_ep._src.experts import Experts
from jax_ep._src.function_mlp import function_mlp_down, function_mlp_up
from jax_ep._src.params import GroupedMlpParams, MoeMlpParams
from jax_ep._src.plan import Plan
from jax_ep._src.redispatch import redispatch


def named_experts(
    x: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
    *,
    experts: Experts,
    remat: str | None,
    params: MoeMlpParams,
) -> tuple[jax.Array, Plan]:
    """Returns the experts' weighted outputs [M, H], with an activation that has a name."""
    if remat == "dispatch":
        return _redispatching(x, topk_ids, topk_weights, experts, _MLP, params)
    rows, row_weights, plan = _dispatch(x, topk_ids, topk_weights, params)
    return epilogue_mlp(rows, experts, plan.group_sizes, row_weights, params.mlp), plan


def function_experts(
    function: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
    *,
    experts: Experts,
    remat: str | None,
    params: MoeMlpParams,
) -> tuple[jax.Array, Plan]:
    """Returns the experts' weighted outputs [M, H], with a function as the activation."""
    if remat == "dispatch":
        (pre_activation, row_weights), plan = _redispatching(
            x, topk_ids, topk_weights, experts.w_up, _UP, params
        )
    else:
        rows, row_weights, plan = _dispatch(x, topk_ids, topk_weights, params)
        pre_activation = function_mlp_up(rows, experts.w_up, plan.group_sizes, params.mlp)
    y = function_mlp_down(
        pre_activation,
        experts,
        plan.group_sizes,
        row_weights,
        function,
        params.mlp,
        keep_activations=remat is None,
    )
    return y, plan


def _dispatch(
    x: jax.Array, topk_ids: jax.Array, topk_weights: jax.Array | None, params: MoeMlpParams
) -> tuple[jax.Array, jax.Array | None, Plan]:
    dispatched = dispatch(
        x,
        topk_ids,
        topk_weights,
        num_experts=params.num_experts,
        axis_name=params.axis_name,
        capacity_factor=params.capacity_factor,
        recv_capacity=params.recv_capacity,
        zero_tail=False,
        num_sms=params.num_comm_sms,
        implementation=params.implementation,
    )
    return dispatched.rows, dispatched.row_weights, dispatched.plan


# ---- remat="dispatch"


class _Rule(NamedTuple):
    """A function of rows with its derivative: `_MLP` or `_UP`.

    Both take rows, parameters, group_sizes, row_weights and params. `forward` returns the result
    and one residual. `backward` takes these with the cotangent, and returns the gradients of rows,
    parameters and row weights.
    """

    forward: Callable[..., tuple[Any, jax.Array | None]]
    backward: Callable[..., tuple[jax.Array, Any, jax.Array | None]]


def _up_forward(
    rows: jax.Array,
    w_up: jax.Array,
    group_sizes: jax.Array,
    row_weights: jax.Array | None,
    params: GroupedMlpParams,
    *,
    keep: bool,
) -> tuple[Any, None]:
    return (function_mlp_up(rows, w_up, group_sizes, params), row_weights), None


def _up_backward(params: GroupedMlpParams, residuals: Any, results_bar: Any) -> Any:
    rows, w_up, group_sizes, *_ = residuals
    pre_activation_bar, row_weights_bar = results_bar
    _, backward = jax.vjp(lambda r, w: function_mlp_up(r, w, group_sizes, params), rows, w_up)
    return *backward(pre_activation_bar), row_weights_bar


_MLP = _Rule(epilogue_mlp_forward, epilogue_mlp_backward)
_UP = _Rule(_up_forward, _up_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _redispatching(
    x: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
    parameters: Any,
    rule: _Rule,
    params: MoeMlpParams,
) -> tuple[Any, Plan]:
    """Applies `rule` to the dispatched x. The backward pass dispatches x again."""
    rows, row_weights, plan = _dispatch(x, topk_ids, topk_weights, params)
    result, _ = rule.forward(
        rows, parameters, plan.group_sizes, row_weights, params.mlp, keep=False
    )
    return result, plan


def _redispatching_forward(
    x: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
    parameters: Any,
    rule: _Rule,
    params: MoeMlpParams,
) -> Any:
    rows, row_weights, plan = _dispatch(x, topk_ids, topk_weights, params)
    result, kept = rule.forward(
        rows, parameters, plan.group_sizes, row_weights, params.mlp, keep=True
    )
    return (result, plan), (x, topk_weights, parameters, plan, kept)


def _redispatching_backward(
    rule: _Rule, params: MoeMlpParams, residuals: Any, cotangents: Any
) -> Any:
    x, topk_weights, parameters, plan, kept = residuals
    result_bar, _ = cotangents

    def send(x: jax.Array, topk_weights: jax.Array | None) -> Any:
        dispatched = redispatch(
            x,
            plan,
            topk_weights,
            num_sms=params.num_comm_sms,
            implementation=params.implementation,
        )
        return dispatched.rows, dispatched.row_weights

    (rows, row_weights), send_backward = jax.vjp(send, x, topk_weights)
    rows_bar, parameters_bar, row_weights_bar = rule.backward(
        params.mlp, (rows, parameters, plan.group_sizes, row_weights, kept), result_bar
    )
    x_bar, topk_weights_bar = send_backward((rows_bar, row_weights_bar))
    return x_bar, None, topk_weights_bar, parameters_bar


_redispatching.defvjp(_redispatching_forward, _redispatching_backward)
