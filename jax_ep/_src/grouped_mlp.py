"""grouped_mlp: two matmuls with an activation between them, for each group of consecutive rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep._src import compat, primitive, runtime
from jax_ep._src.activations import GATED_ACTIVATIONS, PLAIN_ACTIVATIONS, Activation
from jax_ep._src.errors import ArgumentError
from jax_ep._src.grouped_matmul import grouped_matmul, rows_in_groups
from jax_ep._src.grouped_mlp_vjp import Experts, MlpOptions, fused_mlp


def grouped_mlp(
    rows: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    group_sizes: jax.Array,
    row_weights: jax.Array | None = None,
    *,
    activation: Activation = "swiglu",
    b_up: jax.Array | None = None,
    b_down: jax.Array | None = None,
    num_sms: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Sends each group of rows through its own two-layer perceptron: the experts of a layer.

    For each row m, in group g,
    ``row_weights[m] * (activation(rows[m] @ w_up[g] + b_up[g]) @ w_down[g] + b_down[g])``.
    Sums and activations are float32. On CUDA, biases, a named activation, weights and their
    gradients are parts of the matmuls' kernels. It is not a collective: it works inside and outside
    `shard_map`. For the backward pass it keeps its arguments and the pre-activation.

    M rows, L groups, H hidden, F expert hidden.

    Args:
      rows: [M, H] bfloat16, float16 or float32.
      w_up: [L, H, 2, F] (gate, up) for a gated activation, [L, H, F] for a plain one; in rows'
        dtype or float32 (master weights), as rhs of `grouped_matmul`.
      w_down: [L, F, H], in rows' dtype or float32.
      group_sizes: int32[L], as in `grouped_matmul`.
      row_weights: [M] of any float dtype, or None for weights of 1.
      activation: gated ``"swiglu"``, ``"geglu"``; plain ``"gelu"`` (tanh form), ``"relu"``,
        ``"relu2"``, ``"silu"``; or a function from float32 [M, 2, F] or [M, F] to [M, F], which
        runs between the matmuls.
      b_up: [L, 2, F] or [L, F] of any float dtype, or None.
      b_down: [L, H] of any float dtype, or None.
      num_sms: the most streaming multiprocessors to use on CUDA; None chooses. Those of compute
        capability 9.0 work in pairs: odd numbers are rounded down, 1 up.
      implementation: ``"cuda"``, ``"xla"``, or None to choose by platform, dtype and shapes.

    Returns:
      [M, H] in rows' dtype. Rows past the last group are unspecified; those of the arguments and of
      the cotangent are never read, and the gradients there are zeros.

    Raises:
      ArgumentError (a ValueError): shapes that do not fit, an activation that does not, or an
        operand sharded over an Explicit mesh axis.
      DtypeError (a TypeError): a dtype not listed above.
      UnavailableError (a NotImplementedError): ``implementation="cuda"`` where it cannot run.
    """
    operation = "grouped_mlp"
    primitive.check_shape(operation, "rows", rows.shape, ("rows", "hidden"))
    primitive.check_row_dtype(operation, "rows", rows.dtype)
    primitive.check_group_sizes(operation, group_sizes)
    experts = checked_experts(operation, "rows", rows, w_up, w_down, b_up, b_down)
    primitive.check_shape(operation, "group_sizes", group_sizes.shape, (w_up.shape[0],))
    activation = checked_activation(operation, activation, w_up)
    if row_weights is not None:
        row_weights = primitive.check_weights(
            operation, "row_weights", row_weights, (rows.shape[0],)
        )
    options = MlpOptions(
        activation=activation if isinstance(activation, str) else "none",
        zero_tail=True,
        num_sms=primitive.check_num_sms(operation, num_sms),
        implementation=runtime.resolve_implementation(operation, implementation),
    )
    rows, experts, group_sizes, row_weights = compat.vary_together(
        (rows, experts, group_sizes, row_weights)
    )
    with jax.named_scope("jax_ep.grouped_mlp"):
        if isinstance(activation, str):
            return fused_mlp(rows, experts, group_sizes, row_weights, options)
        pre_activation = unfused_up(rows, experts.w_up, group_sizes, options)
        return unfused_down(pre_activation, experts, group_sizes, row_weights, activation, options)


# ---- checks


def checked_experts(
    operation: str,
    rows_name: str,
    rows: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    b_up: jax.Array | None,
    b_down: jax.Array | None,
) -> Experts:
    """The parameters, checked, biases in float32, everything of `w_up` in one dimension."""
    hidden = rows.shape[1]
    gated = (2,) if w_up.ndim == 4 else ()
    expected = ("local experts", hidden, *gated, "expert hidden")
    primitive.check_shape(operation, "w_up", w_up.shape, expected)
    num_local, expert_hidden = w_up.shape[0], w_up.shape[-1]
    primitive.check_shape(operation, "w_down", w_down.shape, (num_local, expert_hidden, hidden))
    for name, matrix in ("w_up", w_up), ("w_down", w_down):
        primitive.check_matrix_dtype(operation, name, matrix, rows_name, rows)
    if b_up is not None:
        shape = (num_local, *gated, expert_hidden)
        b_up = primitive.check_weights(operation, "b_up", b_up, shape).reshape(num_local, -1)
    if b_down is not None:
        b_down = primitive.check_weights(operation, "b_down", b_down, (num_local, hidden))
    return Experts(w_up.reshape(num_local, hidden, -1), w_down, b_up, b_down)


def checked_activation(operation: str, activation: Activation, w_up: jax.Array) -> Activation:
    """The name; or the function, as one from [M, N]."""
    if not isinstance(activation, str):
        return lambda flat: activation(flat.reshape(-1, *w_up.shape[2:]))
    known = GATED_ACTIVATIONS if w_up.ndim == 4 else PLAIN_ACTIVATIONS
    if activation not in known:
        raise ArgumentError(
            f"jax_ep.{operation}: activation={activation!r} with w_up of shape {w_up.shape}; "
            f"expected one of {tuple(GATED_ACTIVATIONS)} with w_up [L, H, 2, F], one of "
            f"{tuple(PLAIN_ACTIVATIONS)} with w_up [L, H, F], or a function."
        )
    return activation


# ---- a function as the activation: it may close over anything, so JAX differentiates the whole


def unfused_up(
    rows: jax.Array, w_up: jax.Array, group_sizes: jax.Array, options: MlpOptions
) -> jax.Array:
    """The first matmul: [M, N]."""
    # Zero tails here and below: a function's parameters get gradients from all rows.
    return grouped_matmul(rows, w_up, group_sizes, **_matmul_options(options))


def unfused_down(
    pre_activation: jax.Array,
    experts: Experts,
    group_sizes: jax.Array,
    row_weights: jax.Array | None,
    function: Callable[[jax.Array], jax.Array],
    options: MlpOptions,
    *,
    keep_hidden: bool = True,
) -> jax.Array:
    """What follows on `unfused_up`; without `keep_hidden` the backward pass repeats the function.

    The weight multiplies the activation, so that no output row is kept for its gradient.
    """
    dtype = pre_activation.dtype
    scale = rows_in_groups(group_sizes, pre_activation.shape[0]).astype(jnp.float32)
    if row_weights is not None:
        scale = jnp.where(scale > 0, row_weights, 0)

    def bias_rows(scale: jax.Array, bias: jax.Array) -> jax.Array:
        # A matmul of inner size 1: its gradients sum over each group in a fixed order.
        return grouped_matmul(
            scale[:, None], bias[:, None, :], group_sizes, **_matmul_options(options)
        )

    def activate(pre_activation: jax.Array, scale: jax.Array, b_up: jax.Array | None) -> jax.Array:
        wide = pre_activation.astype(jnp.float32)
        if b_up is not None:
            wide = wide + bias_rows(jnp.ones_like(scale), b_up)
        hidden = function(wide)
        if row_weights is not None:
            hidden = hidden * scale[:, None]
        return hidden.astype(dtype)

    activate = activate if keep_hidden else jax.checkpoint(activate)
    hidden = activate(pre_activation, scale, experts.b_up)
    if experts.b_down is None:
        return grouped_matmul(hidden, experts.w_down, group_sizes, **_matmul_options(options))
    y = grouped_matmul(
        hidden,
        experts.w_down,
        group_sizes,
        preferred_element_type=jnp.float32,
        **_matmul_options(options),
    )
    return (y + bias_rows(scale, experts.b_down)).astype(dtype)


def _matmul_options(options: MlpOptions) -> dict[str, Any]:
    return {"num_sms": options.num_sms or None, "implementation": options.implementation}
