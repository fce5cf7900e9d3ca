"""moe_mlp: dispatch, two grouped matmuls with an activation between them, and combine."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_ep import compat, lowering
from jax_ep.combine import combine
from jax_ep.dispatch import dispatch
from jax_ep.errors import ArgumentError
from jax_ep.grouped_matmul import grouped_matmul
from jax_ep.mesh import AxisName, expert_axis
from jax_ep.plan import Plan

GATED_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "swiglu": lambda gate: jax.nn.silu(gate),
    "geglu": lambda gate: jax.nn.gelu(gate),
}
PLAIN_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda up: jax.nn.gelu(up),
    "relu": lambda up: jax.nn.relu(up),
    "relu2": lambda up: jnp.square(jax.nn.relu(up)),
    "silu": lambda up: jax.nn.silu(up),
}

Activation = str | Callable[[jax.Array], jax.Array]


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
    The routing weight multiplies the activation, before the second matmul, so that no output row
    has to be kept for the backward pass. Activations are computed in float32.

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
        ``"relu2"``, ``"silu"``; or a function from float32 [M, 2, F] or [M, F] to [M, F].
      b_up: [L, 2, F] or [L, F], or None.
      b_down: [L, H], or None.
      recv_capacity: the rows this rank can receive, as in `dispatch`, shared by all chunks.
      num_chunks: splits the tokens into this many calls, so that one's transfer can overlap
        another's matmuls, and to bound memory. T must be a multiple of it.
      remat: ``"dispatch"`` does not keep the dispatched rows and the activations for the backward
        pass: it sends x again along the plan, and recomputes the activations. None keeps both.
      num_sms: as in `dispatch`.
      implementation: as in `dispatch`.

    Returns:
      [T, H] in x's dtype, and the plan (a tuple of one plan a chunk if there are several).

    Raises:
      ArgumentError (a ValueError): shapes or values that do not fit, or a call outside `shard_map`.
      DtypeError (a TypeError): a dtype not listed above.
      UnavailableError (a NotImplementedError): ``implementation="cuda"`` where it cannot run.
    """
    _check_weights(x, w_up, w_down, b_up, b_down)
    _check_options(x, activation, w_up, num_chunks, remat)
    axis = expert_axis("moe_mlp", axis_name)
    options = _Options(
        num_experts=w_up.shape[0] * axis.size,
        axis_name=axis.name,
        recv_capacity=None if recv_capacity is None else -(-recv_capacity // num_chunks),
        num_sms=num_sms,
        implementation=implementation,
    )
    x, topk_ids, topk_weights, w_up, w_down, b_up, b_down = compat.vary_together(
        (x, topk_ids, topk_weights, w_up, w_down, b_up, b_down), axis.names
    )

    def one_chunk(
        x: jax.Array, topk_ids: jax.Array, topk_weights: jax.Array | None
    ) -> tuple[jax.Array, Plan]:
        flat_w_up = w_up.reshape(*w_up.shape[:2], -1)
        up = _dispatch_matmul if remat is None else _dispatch_matmul_again
        pre_activation, row_weights, plan = up(x, topk_ids, topk_weights, flat_w_up, options)
        pre_activation = pre_activation.reshape(-1, *w_up.shape[2:])
        activate = functools.partial(_activate, activation)
        hidden = (activate if remat is None else jax.checkpoint(activate))(
            pre_activation, row_weights, b_up, plan
        )
        y = options.matmul(hidden, w_down, plan)
        if b_down is not None:
            scale = jnp.ones(y.shape[0]) if row_weights is None else row_weights
            y = y + _expert_rows(scale, b_down, plan).astype(y.dtype)
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


def _check_weights(
    x: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    b_up: jax.Array | None,
    b_down: jax.Array | None,
) -> None:
    lowering.check_shape("moe_mlp", "x", x.shape, ("tokens", "hidden"))
    hidden = x.shape[1]
    gated = (2,) if w_up.ndim == 4 else ()
    expected = ("local experts", hidden, *gated, "expert hidden")
    lowering.check_shape("moe_mlp", "w_up", w_up.shape, expected)
    num_local, expert_hidden = w_up.shape[0], w_up.shape[-1]
    lowering.check_shape("moe_mlp", "w_down", w_down.shape, (num_local, expert_hidden, hidden))
    if b_up is not None:
        lowering.check_shape("moe_mlp", "b_up", b_up.shape, (num_local, *gated, expert_hidden))
    if b_down is not None:
        lowering.check_shape("moe_mlp", "b_down", b_down.shape, (num_local, hidden))


def _check_options(
    x: jax.Array, activation: Activation, w_up: jax.Array, num_chunks: int, remat: str | None
) -> None:
    if isinstance(activation, str):
        known = GATED_ACTIVATIONS if w_up.ndim == 4 else PLAIN_ACTIVATIONS
        if activation not in known:
            raise ArgumentError(
                f"jax_ep.moe_mlp: activation={activation!r} with w_up of shape {w_up.shape}; "
                f"expected one of {tuple(GATED_ACTIVATIONS)} with w_up [L, H, 2, F], one of "
                f"{tuple(PLAIN_ACTIVATIONS)} with w_up [L, H, F], or a function."
            )
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


# ---- up: dispatch and the first matmul


@dataclasses.dataclass(frozen=True)
class _Options:
    """What all operations of one layer have in common, hashed by value."""

    num_experts: int
    axis_name: AxisName
    recv_capacity: int | None
    num_sms: int | None
    implementation: str | None

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

    def matmul(self, lhs: jax.Array, rhs: jax.Array, plan: Plan) -> jax.Array:
        return grouped_matmul(
            lhs, rhs, plan.group_sizes, zero_tail=False, implementation=self.implementation
        )


def _dispatch_matmul(
    x: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
    w_up: jax.Array,
    options: _Options,
) -> tuple[jax.Array, jax.Array | None, Plan]:
    rows, row_weights, plan = options.dispatch(x, topk_ids, topk_weights)
    return options.matmul(rows, w_up, plan), row_weights, plan


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _dispatch_matmul_again(
    x: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
    w_up: jax.Array,
    options: _Options,
) -> tuple[jax.Array, jax.Array | None, Plan]:
    """`_dispatch_matmul`, whose backward pass dispatches x again rather than keep the rows."""
    return _dispatch_matmul(x, topk_ids, topk_weights, w_up, options)


def _again_forward(
    x: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
    w_up: jax.Array,
    options: _Options,
) -> Any:
    results = _dispatch_matmul(x, topk_ids, topk_weights, w_up, options)
    return results, (x, topk_weights, w_up, results[2])


def _again_backward(options: _Options, residuals: Any, cotangents: Any) -> Any:
    x, topk_weights, w_up, plan = residuals
    pre_activation_bar, row_weights_bar, _ = cotangents

    def along_plan(x: jax.Array, topk_weights: jax.Array | None) -> Any:
        return options.dispatch(x, None, topk_weights, plan)[:2]

    (rows, _), dispatch_backward = jax.vjp(along_plan, x, topk_weights)
    _, matmul_backward = jax.vjp(lambda r, w: options.matmul(r, w, plan), rows, w_up)
    rows_bar, w_up_bar = matmul_backward(pre_activation_bar)
    x_bar, topk_weights_bar = dispatch_backward((rows_bar, row_weights_bar))
    return x_bar, None, topk_weights_bar, w_up_bar


_dispatch_matmul_again.defvjp(_again_forward, _again_backward)


# ---- activation


def _activate(
    activation: Activation,
    pre_activation: jax.Array,
    row_weights: jax.Array | None,
    b_up: jax.Array | None,
    plan: Plan,
) -> jax.Array:
    """The activation times the row weight, [M, F], in the dtype of the pre-activation."""
    wide = pre_activation.astype(jnp.float32)
    if b_up is not None:
        rows = _expert_rows(jnp.ones(wide.shape[0]), b_up.reshape(b_up.shape[0], -1), plan)
        wide = wide + rows.reshape(wide.shape)
    if not isinstance(activation, str):
        hidden = activation(wide)
    elif activation in GATED_ACTIVATIONS:
        hidden = GATED_ACTIVATIONS[activation](wide[:, 0]) * wide[:, 1]
    else:
        hidden = PLAIN_ACTIVATIONS[activation](wide)
    if row_weights is not None:
        hidden = hidden * row_weights[:, None]
    return hidden.astype(pre_activation.dtype)


def _expert_rows(scale: jax.Array, bias: jax.Array, plan: Plan) -> jax.Array:
    """scale[m] * bias[the expert of row m], float32 [M, N].

    A matmul of inner size 1: its gradients sum over each group in a fixed order.
    """
    return grouped_matmul(
        scale[:, None], bias.astype(jnp.float32)[:, None, :], plan.group_sizes, zero_tail=False
    )
