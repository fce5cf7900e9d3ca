"""The shared expert: an MLP that every token of its rank takes, without a transfer."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep._src.core import checks, compat
from jax_ep._src.core.errors import ArgumentError
from jax_ep._src.matmul.activations import Activation
from jax_ep._src.mlp.expert_forms import UpWeights, check_activation, check_forms, kind_of
from jax_ep._src.mlp.grouped_mlp import grouped_mlp
from jax_ep._src.moe.params import Remat

SharedExpert = tuple[UpWeights, jax.Array]
"""w_up and w_down as those of an expert, without their first dimension."""


def check_gate(operation: str, gate: jax.Array | None, shared_expert: SharedExpert | None) -> None:
    """Raises for a gate without a shared expert."""
    if gate is not None and shared_expert is None:
        raise ArgumentError(
            f"jax_ep.{operation}: shared_gate is given without shared_expert; expected both or no "
            "gate. Give the (w_up, w_down) whose output it multiplies."
        )


def shared_expert_output(
    x: jax.Array,
    weights: SharedExpert,
    gate: jax.Array | None,
    activation: Activation,
    *,
    remat: Remat,
    implementation: str | None,
    num_sms: int = 0,
) -> jax.Array:
    """Returns [T, H]: one group of the grouped matmuls, which nothing routes.

    With a gate, sigmoids are the row weights of that group.
    """
    if not (isinstance(weights, tuple | list) and len(weights) == 2):
        raise ArgumentError(
            f"jax_ep.moe_mlp: shared_expert is a {type(weights).__name__}; expected a pair, "
            "(w_up, w_down). Give the matrices as those of one expert."
        )
    _check(x, *weights, activation)
    row_weights = None
    if gate is not None:
        gate = checks.weights("moe_mlp", "shared_gate", gate, (x.shape[1], 1))
        logits = jnp.dot(x.astype(jnp.float32), gate, precision=lax.Precision.HIGHEST)
        row_weights = jax.nn.sigmoid(logits[:, 0])
    w_up, w_down = jax.tree.map(lambda matrix: matrix[None], tuple(weights))
    num_tokens = jnp.full(1, x.shape[0], jnp.int32)
    compute: Callable[..., jax.Array] = functools.partial(
        grouped_mlp,
        activation=activation,
        zero_tail=False,
        num_sms=num_sms or None,
        implementation=implementation,
    )
    if remat == "experts":
        compute = compat.checkpoint(compute)
    with jax.named_scope("jax_ep.shared_expert"):
        return compute(x, w_up, w_down, num_tokens, row_weights)


def _check(x: jax.Array, w_up: UpWeights, w_down: jax.Array, activation: Activation) -> None:
    """Raises unless these are the matrices of one expert for x [T, H]."""
    operation, up, down = "moe_mlp", "shared_expert[0]", "shared_expert[1]"
    checks.shape(operation, down, w_down, ("intermediate size", x.shape[1]))
    is_gated = check_activation(operation, activation)
    lead, size = x.shape[1:], w_down.shape[0]
    arrays, _ = check_forms(operation, up, w_up, lead, size, is_gated, kind_of(activation), down)
    for name, matrix in (*((up, array) for array in arrays), (down, w_down)):
        checks.matrix_dtype(operation, name, matrix, "x", x)
