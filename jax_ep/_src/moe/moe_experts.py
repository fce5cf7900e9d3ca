"""The transfers of moe_mlp, and the local experts between them.

With a ``remat`` its derivative sends x again along the plan rather than keep the rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep._src.core import compat
from jax_ep._src.matmul.accumulation import Accumulators
from jax_ep._src.mlp.epilogue_mlp import (
    epilogue_mlp,
    epilogue_mlp_backward,
    epilogue_mlp_forward,
    repeat_pre_activation,
)
from jax_ep._src.mlp.experts import Experts, gradient_of_experts
from jax_ep._src.mlp.function_mlp import (
    function_mlp_down,
    function_mlp_up,
    function_mlp_up_backward,
)
from jax_ep._src.mlp.params import GroupedMlpParams
from jax_ep._src.mlp.quantized_mlp import (
    quantized_cotangents,
    quantized_mlp,
    quantized_mlp_backward,
    quantized_mlp_forward,
    quantized_rows,
    repeat_quantized_pre_activation,
)
from jax_ep._src.moe.gradients_in_flight import gradients_in_flight
from jax_ep._src.moe.params import MoeMlpParams
from jax_ep._src.quant.quantized import as_bits, from_bits
from jax_ep._src.transfer.combine import checked_combine
from jax_ep._src.transfer.dispatch import checked_dispatch
from jax_ep._src.transfer.plan import Dispatched, Plan
from jax_ep._src.transfer.primitives import Rows
from jax_ep._src.transfer.redispatch import checked_redispatch

Outputs = tuple[jax.Array, Plan, Accumulators]
"""The tokens' sums [T, H], the plan, and accumulators for a later call."""


def named_experts(
    x: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
    *,
    experts: Experts,
    remat: str | None,
    params: MoeMlpParams,
) -> Outputs:
    """Returns the tokens' sums, with an activation that has a name."""
    recipe = params.mlp.quantization
    if remat is not None or params.sends_quantized_cotangents or params.sends_quantized_rows:
        rule = _RULES[recipe is not None, remat]
        results = _redispatching(x, topk_ids, topk_weights, experts, rule, params)
        y, plan, accumulators = compat.without_tangents(results)
        if not params.sends_quantized_cotangents:
            y = checked_combine(y, plan, None, params.transfer)
        return y, plan, accumulators
    dispatched = checked_dispatch(as_bits(x), topk_ids, topk_weights, params.transfer)
    y, accumulators = computed(dispatched, experts, params)
    plan = dispatched.plan
    return checked_combine(y, plan, None, params.transfer), plan, accumulators


def computed(
    dispatched: Dispatched, experts: Experts, params: MoeMlpParams
) -> tuple[jax.Array, Accumulators]:
    """Returns what the experts make of their rows, multiplied by the routing weights."""
    rows, row_weights = _weighed(dispatched, params)
    mlp = epilogue_mlp if params.mlp.quantization is None else quantized_mlp
    group_sizes = experts.group_sizes(dispatched.plan.group_sizes)
    return mlp(rows, experts, group_sizes, row_weights, params.mlp)


def function_experts(
    function: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
    *,
    experts: Experts,
    remat: str | None,
    params: MoeMlpParams,
) -> Outputs:
    """Returns the same as `named_experts`, with a function as the activation."""
    if remat == "experts":  # the function may close over anything, so JAX repeats the whole
        repeated = functools.partial(function_experts, function, remat=None, params=params)
        return compat.checkpoint(repeated)(x, topk_ids, topk_weights, experts=experts)
    if remat == "dispatch":
        w_up, accumulators = experts.w_up, Accumulators(experts.accumulators.w_up, None)
        up = compat.without_gradients(experts)._replace(w_up=w_up, accumulators=accumulators)
        results = _redispatching(x, topk_ids, topk_weights, up, _UP, params)
        (pre_activation, row_weights), plan, (up_accumulator, _) = compat.without_tangents(results)
    else:
        rows, row_weights, plan = send(x, topk_ids, topk_weights, params)
        pre_activation, up_accumulator = function_mlp_up(
            rows, experts, experts.group_sizes(plan.group_sizes), params.mlp
        )
    y, down_accumulator = function_mlp_down(
        pre_activation,
        experts,
        experts.group_sizes(plan.group_sizes),
        row_weights,
        function,
        params.mlp,
        keep_activations=remat is None,
    )
    accumulators = Accumulators(up_accumulator, down_accumulator)
    return checked_combine(y, plan, None, params.transfer), plan, accumulators


def send(
    x: Rows,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
    params: MoeMlpParams,
) -> tuple[Any, jax.Array | None, Plan]:
    """Returns rows, row weights and the plan. Weights on the input are in the rows, and None."""
    dispatched = checked_dispatch(as_bits(x), topk_ids, topk_weights, params.transfer)
    return *_weighed(dispatched, params), dispatched.plan


def _weighed(dispatched: Dispatched, params: MoeMlpParams) -> tuple[Any, jax.Array | None]:
    rows, row_weights = dispatched.rows, dispatched.row_weights
    if not params.weights_on_input or row_weights is None:
        return rows, row_weights
    return (rows.astype(jnp.float32) * row_weights[:, None]).astype(rows.dtype), None


# ---- remat="dispatch" and remat="experts"


class _Rule(NamedTuple):
    """A function of rows with its derivative: `_MLP`, `_QUANTIZED`, what repeats them, or `_UP`.

    Both take rows, experts, group_sizes, row_weights and params. `forward` returns the result and
    one residual. `backward` takes these with the cotangent and the accumulators, and returns the
    gradients of rows, experts and row weights.
    """

    forward: Callable[..., tuple[Any, jax.Array | None]]
    backward: Callable[..., tuple[jax.Array, Any, jax.Array | None]]
    keeps_rows: bool = False  # for the backward pass, rather than send them again


def _up_forward(
    rows: jax.Array,
    experts: Experts,
    group_sizes: jax.Array,
    row_weights: jax.Array | None,
    params: GroupedMlpParams,
    *,
    keep: bool,
) -> tuple[Any, None]:
    pre_activation, _ = function_mlp_up(rows, experts, group_sizes, params)
    return (pre_activation, row_weights), None


def _up_backward(
    params: GroupedMlpParams, residuals: Any, results_bar: Any, accumulators: Accumulators
) -> Any:
    rows, experts, group_sizes, *_ = residuals
    pre_activation_bar, row_weights_bar = results_bar
    rows_bar, w_up_bar = function_mlp_up_backward(
        params, (rows, experts, group_sizes), pre_activation_bar, accumulators.w_up
    )
    experts_bar = gradient_of_experts(params.accumulation, w_up_bar, None, None, None)
    return rows_bar, experts_bar, row_weights_bar


def _repeating(rule: _Rule, repeat: Callable[..., jax.Array]) -> _Rule:
    """Returns the rule without its residual, the pre-activation, which `repeat` computes again."""

    def forward(*operands: Any, keep: bool) -> tuple[jax.Array, None]:
        y, _ = rule.forward(*operands, keep=False)
        return y, None

    def backward(
        params: GroupedMlpParams, residuals: Any, y_bar: jax.Array, accumulators: Accumulators
    ) -> Any:
        rows, experts, group_sizes, row_weights, _ = residuals
        pre_activation = repeat(rows, experts, group_sizes, params)
        residuals = rows, experts, group_sizes, row_weights, pre_activation
        return rule.backward(params, residuals, y_bar, accumulators)

    return _Rule(forward, backward)


_MLP = _Rule(epilogue_mlp_forward, epilogue_mlp_backward)
_REPEATING_MLP = _repeating(_MLP, repeat_pre_activation)
_QUANTIZED = _Rule(quantized_mlp_forward, quantized_mlp_backward)
_REPEATING_QUANTIZED = _repeating(_QUANTIZED, repeat_quantized_pre_activation)
_UP = _Rule(_up_forward, _up_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _redispatching(
    x: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
    experts: Experts,
    rule: _Rule,
    params: MoeMlpParams,
) -> tuple[Any, Plan, Accumulators]:
    """Applies `rule` to the dispatched x. The backward pass dispatches x again.

    The result is combined already if cotangents are sent quantized: the cotangent of the rows would
    be a float array.
    """
    rows, row_weights, plan = send(_sent(x, params), topk_ids, topk_weights, params)
    result, _ = rule.forward(
        rows, experts, experts.group_sizes(plan.group_sizes), row_weights, params.mlp, keep=False
    )
    accumulators = experts.passed_on(params.mlp.accumulation, jax.tree.leaves(result)[0])
    if params.sends_quantized_cotangents:
        result = checked_combine(result, plan, None, params.transfer)
    return result, plan, accumulators


def _redispatching_forward(
    x: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
    experts: Experts,
    rule: _Rule,
    params: MoeMlpParams,
) -> Any:
    rows, row_weights, plan = send(_sent(x, params), topk_ids, topk_weights, params)
    if rule.keeps_rows:
        rows, _ = quantized_rows(rows, params.mlp)
    # Named again: jax.checkpoint finds no names inside the call of dispatch.
    rows, row_weights = from_bits(checkpoint_name(as_bits((rows, row_weights)), "jax_ep.rows"))
    plan = checkpoint_name(plan, "jax_ep.plan")
    result, kept = rule.forward(
        rows, experts, experts.group_sizes(plan.group_sizes), row_weights, params.mlp, keep=True
    )
    accumulators = experts.passed_on(params.mlp.accumulation, jax.tree.leaves(result)[0])
    if params.sends_quantized_cotangents:
        result = checked_combine(result, plan, None, params.transfer)
        result = checkpoint_name(result, "jax_ep.combined")
    # With transfers in flight the weights are needed before the rows are there again.
    rows_kept = rows if rule.keeps_rows else None
    weights_kept = row_weights if rule.keeps_rows or params.is_in_flight else None
    sent = rows_kept, weights_kept
    residuals = x, topk_weights, experts.without_accumulators(), plan, kept, sent
    return (result, plan, accumulators), as_bits(residuals)


def _redispatching_backward(
    rule: _Rule, params: MoeMlpParams, residuals: Any, cotangents: Any
) -> Any:
    x, topk_weights, experts, plan, kept, (rows_kept, weights_kept) = from_bits(residuals)
    result_bar, _, accumulators = cotangents
    if params.is_in_flight:
        operands = x, experts, plan, kept, weights_kept
        x_bar, topk_weights_bar, experts_bar = gradients_in_flight(
            params, operands, result_bar, accumulators
        )
        return x_bar, None, topk_weights_bar, experts_bar
    if params.sends_quantized_cotangents:
        quantized_bar = quantized_cotangents(result_bar, params.mlp)
        result_bar = checked_redispatch(as_bits(quantized_bar), plan, None, params.transfer).rows

    def resend(x: Any, topk_weights: jax.Array | None) -> Any:
        return _weighed(checked_redispatch(as_bits(x), plan, topk_weights, params.transfer), params)

    sent, resend_backward = jax.vjp(resend, x, topk_weights)
    if rule.keeps_rows:
        sent = rows_kept, weights_kept
    elif (quantized := _sent(x, params)) is not x:
        sent = resend(quantized, topk_weights)
    rows, row_weights = sent
    rows_bar, experts_bar, row_weights_bar = rule.backward(
        params.mlp,
        (rows, experts, experts.group_sizes(plan.group_sizes), row_weights, kept),
        result_bar,
        accumulators,
    )
    x_bar, topk_weights_bar = resend_backward((rows_bar, row_weights_bar))
    return x_bar, None, topk_weights_bar, experts_bar


def _sent(x: jax.Array, params: MoeMlpParams) -> Rows:
    """Returns what dispatch sends of x."""
    return quantized_rows(x, params.mlp)[0] if params.sends_quantized_rows else x


_RULES: dict[tuple[bool, str | None], _Rule] = {
    (False, "dispatch"): _MLP,
    (False, "experts"): _REPEATING_MLP,
    (True, None): _QUANTIZED._replace(keeps_rows=True),
    (True, "dispatch"): _QUANTIZED,
    (True, "experts"): _REPEATING_QUANTIZED,
}
"""By whether matmuls are quantized, and `remat`."""

_redispatching.defvjp(_redispatching_forward, _redispatching_backward)
