"""moe_mlp: dispatch, two grouped matmuls with an activation between them, and combine."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep._src import compat, primitive, runtime
from jax_ep._src.activations import Activation
from jax_ep._src.combine import combine
from jax_ep._src.dispatch import dispatch
from jax_ep._src.errors import ArgumentError
from jax_ep._src.grouped_mlp import checked_activation, checked_experts, unfused_down, unfused_up
from jax_ep._src.grouped_mlp_vjp import (
    Experts,
    MlpOptions,
    fused_mlp,
    fused_mlp_backward,
    fused_mlp_forward,
)
from jax_ep._src.mesh import AxisName, expert_axis
from jax_ep._src.plan import Plan


def moe_mlp(
    x: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
    w_up: jax.Array,
    w_down: jax.Array,
    *,
    axis_name: AxisName,
    activation: Activation = "swiglu",
    b_up: jax.Array | None = None,
    b_down: jax.Array | None = None,
    recv_capacity: int | None = None,
    num_chunks: int = 1,
    remat: Literal["dispatch"] | None = "dispatch",
    num_sms: int | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, Plan | tuple[Plan, ...]]:
    """A mixture-of-experts layer after its router. Call it inside `jax.shard_map`.

    For each token the sum over its choices k of
    ``topk_weights[k] * (activation(x @ w_up[e_k] + b_up[e_k]) @ w_down[e_k] + b_down[e_k])``.
    It is `dispatch`, `grouped_mlp` and `combine`. The routing weight multiplies in the second
    matmul's kernel; its gradient is a row dot product of hidden rows, so that no output row is kept
    for the backward pass. Activations are computed in float32.

    R ranks, L local experts, T tokens a rank, K choices a token, H hidden, F expert hidden.

    Args:
      x: [T, H] bfloat16, float16 or float32.
      topk_ids: int32[T, K], as in `dispatch`.
      topk_weights: [T, K] of any float dtype; None sums without weights.
      w_up: [L, H, 2, F] (gate, up) for a gated activation, [L, H, F] for a plain one; in x's dtype
        or float32.
      w_down: [L, F, H], in x's dtype or float32.
      axis_name: the expert axis, or a tuple of mesh axes that are it together.
      activation: gated ``"swiglu"``, ``"geglu"``; plain ``"gelu"`` (tanh form), ``"relu"``,
        ``"relu2"``, ``"silu"``; or a function from float32 [M, 2, F] or [M, F] to [M, F], as in
        `grouped_mlp`.
      b_up: [L, 2, F] or [L, F] of any float dtype, or None.
      b_down: [L, H] of any float dtype, or None.
      recv_capacity: the rows this rank can receive, as in `dispatch`, shared by all chunks.
      num_chunks: splits the tokens into this many calls, so that one's transfer can overlap
        another's matmuls, and to bound memory. T must be a multiple of it.
      remat: ``"dispatch"`` does not keep the dispatched rows for the backward pass: it sends x
        again along the plan. None keeps them. Both keep the pre-activation, and recompute the
        activation (None keeps the result of a function of one's own).
      num_sms: as in `dispatch`.
      implementation: as in `dispatch`.

    Returns:
      [T, H] in x's dtype, and the plan (a tuple of one plan a chunk if there are several).

    Raises:
      ArgumentError (a ValueError): shapes or values that do not fit, or a call outside `shard_map`.
      DtypeError (a TypeError): a dtype not listed above.
      UnavailableError (a NotImplementedError): ``implementation="cuda"`` where it cannot run.
    """
    primitive.check_shape("moe_mlp", "x", x.shape, ("tokens", "hidden"))
    primitive.check_row_dtype("moe_mlp", "x", x.dtype)
    experts = checked_experts("moe_mlp", "x", x, w_up, w_down, b_up, b_down)
    activation = checked_activation("moe_mlp", activation, w_up)
    _check_options(x, num_chunks, remat)
    axis = expert_axis("moe_mlp", axis_name)
    options = _Options(
        num_experts=w_up.shape[0] * axis.size,
        axis_name=axis.name,
        recv_capacity=None if recv_capacity is None else -(-recv_capacity // num_chunks),
        num_sms=num_sms,
        implementation=implementation,
        mlp=MlpOptions(
            activation=activation if isinstance(activation, str) else "none",
            zero_tail=False,  # combine, dispatch's gradient, does not read it
            num_sms=0,  # a limit is for transfers
            implementation=runtime.resolve_implementation("moe_mlp", implementation),
        ),
    )
    x, topk_ids, topk_weights, experts = compat.vary_together(
        (x, topk_ids, topk_weights, experts), axis.names
    )

    def one_chunk(
        x: jax.Array, topk_ids: jax.Array, topk_weights: jax.Array | None
    ) -> tuple[jax.Array, Plan]:
        layer = _layer if isinstance(activation, str) else functools.partial(_unfused, activation)
        y, plan = layer(x, topk_ids, topk_weights, experts, remat, options)
        out = combine(y, plan, None, num_sms=num_sms, implementation=implementation)
        return out, plan

    with jax.named_scope("jax_ep.moe_mlp"):
        if num_chunks == 1:
            return one_chunk(x, topk_ids, topk_weights)
        per_chunk = x.shape[0] // num_chunks
        chunks = [
            one_chunk(
                *jax.tree.map(lambda a, i=i: a[i : i + per_chunk], (x, topk_ids, topk_weights))
            )
            for i in range(0, x.shape[0], per_chunk)
        ]
        return jnp.concatenate([out for out, _ in chunks]), tuple(plan for _, plan in chunks)


# ---- checks


def _check_options(x: jax.Array, num_chunks: int, remat: str | None) -> None:
    if not 1 <= num_chunks <= max(1, x.shape[0]) or x.shape[0] % num_chunks:
        raise ArgumentError(
            f"jax_ep.moe_mlp: num_chunks={num_chunks} with {x.shape[0]} tokens a rank; expected a "
            "positive divisor of the tokens. Pad the tokens (ids of -1 cost nothing), or choose "
            "another number."
        )
    if remat not in (None, "dispatch"):
        raise ArgumentError(
            f"jax_ep.moe_mlp: remat={remat!r}; expected 'dispatch' or None. For other policies "
            "wrap the layer in jax.checkpoint with jax_ep.REMAT_NAMES."
        )


# ---- dispatch and the experts


@dataclasses.dataclass(frozen=True)
class _Options:
    """What all operations of one layer have in common, hashed by value."""

    num_experts: int
    axis_name: AxisName
    recv_capacity: int | None
    num_sms: int | None
    implementation: str | None
    mlp: MlpOptions

    def dispatch(
        self,
        x: jax.Array,
        topk_ids: jax.Array | None,
        topk_weights: jax.Array | None,
        plan: Plan | None = None,
    ) -> tuple[jax.Array, jax.Array | None, Plan]:
        rows, row_weights, _, plan = dispatch(
            x,
            topk_ids,
            topk_weights,
            num_experts=self.num_experts,
            axis_name=self.axis_name,
            recv_capacity=self.recv_capacity,
            plan=plan,
            zero_tail=False,
            num_sms=self.num_sms,
            implementation=self.implementation,
        )
        return rows, row_weights, plan


def _layer(
    x: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
    experts: Experts,
    remat: str | None,
    options: _Options,
) -> tuple[jax.Array, Plan]:
    """The experts' outputs, weighted, and the plan."""
    if remat == "dispatch":
        return _dispatch_again(x, topk_ids, topk_weights, experts, _MLP, options)
    rows, row_weights, plan = options.dispatch(x, topk_ids, topk_weights)
    return fused_mlp(rows, experts, plan.group_sizes, row_weights, options.mlp), plan


def _unfused(
    function: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
    experts: Experts,
    remat: str | None,
    options: _Options,
) -> tuple[jax.Array, Plan]:
    """`_layer` with a function as the activation."""
    if remat == "dispatch":
        (pre_activation, row_weights), plan = _dispatch_again(
            x, topk_ids, topk_weights, experts.w_up, _UP, options
        )
    else:
        rows, row_weights, plan = options.dispatch(x, topk_ids, topk_weights)
        pre_activation = unfused_up(rows, experts.w_up, plan.group_sizes, options.mlp)
    y = unfused_down(
        pre_activation,
        experts,
        plan.group_sizes,
        row_weights,
        function,
        options.mlp,
        keep_hidden=remat is None,
    )
    return y, plan


# ---- remat="dispatch": a derivative that dispatches x again rather than keep the rows


class _Rule(NamedTuple):
    """A function of rows, and its derivative: `_MLP` or `_UP`.

    Args of both are rows, parameters, group_sizes, row_weights and options. `forward` returns the
    result, and what `backward` takes with these and the cotangent to return the gradients of rows,
    parameters and row weights.
    """

    forward: Callable[..., tuple[Any, jax.Array | None]]
    backward: Callable[..., tuple[jax.Array, Any, jax.Array | None]]


def _up_forward(
    rows: jax.Array,
    w_up: jax.Array,
    group_sizes: jax.Array,
    row_weights: jax.Array | None,
    options: MlpOptions,
    *,
    keep: bool,
) -> tuple[Any, None]:
    return (unfused_up(rows, w_up, group_sizes, options), row_weights), None


def _up_backward(options: MlpOptions, residuals: Any, results_bar: Any) -> Any:
    rows, w_up, group_sizes, *_ = residuals
    pre_activation_bar, row_weights_bar = results_bar
    _, backward = jax.vjp(lambda r, w: unfused_up(r, w, group_sizes, options), rows, w_up)
    return *backward(pre_activation_bar), row_weights_bar


_MLP = _Rule(fused_mlp_forward, fused_mlp_backward)
_UP = _Rule(_up_forward, _up_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _dispatch_again(
    x: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
    parameters: Any,
    rule: _Rule,
    options: _Options,
) -> tuple[Any, Plan]:
    """`rule` of x dispatched, and the plan."""
    rows, row_weights, plan = options.dispatch(x, topk_ids, topk_weights)
    result, _ = rule.forward(
        rows, parameters, plan.group_sizes, row_weights, options.mlp, keep=False
    )
    return result, plan


def _again_forward(
    x: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
    parameters: Any,
    rule: _Rule,
    options: _Options,
) -> Any:
    rows, row_weights, plan = options.dispatch(x, topk_ids, topk_weights)
    result, kept = rule.forward(
        rows, parameters, plan.group_sizes, row_weights, options.mlp, keep=True
    )
    return (result, plan), (x, topk_weights, parameters, plan, kept)


def _again_backward(rule: _Rule, options: _Options, residuals: Any, cotangents: Any) -> Any:
    x, topk_weights, parameters, plan, kept = residuals
    result_bar, _ = cotangents

    def along_plan(x: jax.Array, topk_weights: jax.Array | None) -> Any:
        return options.dispatch(x, None, topk_weights, plan)[:2]

    (rows, row_weights), dispatch_backward = jax.vjp(along_plan, x, topk_weights)
    rows_bar, parameters_bar, row_weights_bar = rule.backward(
        options.mlp, (rows, parameters, plan.group_sizes, row_weights, kept), result_bar
    )
    x_bar, topk_weights_bar = dispatch_backward((rows_bar, row_weights_bar))
    return x_bar, None, topk_weights_bar, parameters_bar


_dispatch_again.defvjp(_again_forward, _again_backward)
