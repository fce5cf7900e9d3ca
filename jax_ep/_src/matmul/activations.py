"""The activations that have a name, on float32."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp

GATED_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "swiglu": lambda gate: jax.nn.silu(gate),
    "geglu": lambda gate: jax.nn.gelu(gate),
}
"""By name, the function of the gate; it multiplies the up projection."""

PLAIN_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda up: jax.nn.gelu(up),
    "relu": lambda up: jax.nn.relu(up),
    "relu2": lambda up: jnp.square(jax.nn.relu(up)),
    "silu": lambda up: jax.nn.silu(up),
}

Activation = str | Callable[..., jax.Array]
"""A name, or a function: of (gate, up), or of one array."""


def takes_gate_and_up(function: Callable[..., jax.Array]) -> bool:
    """Whether a function has two arguments without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have no signature
        return False
    positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    required = [p for p in parameters if p.kind in positional and p.default is p.empty]
    return len(required) == 2


def num_outputs(activation: str, num_columns: int) -> int:
    """F, the columns of the activations of a pre-activation with N columns."""
    return num_columns // 2 if activation in GATED_ACTIVATIONS else num_columns


def activate(activation: str, pre_activation: jax.Array) -> jax.Array:
    """[M, N] -> [M, F]. For a gated activation, the first F columns are the gate."""
    if activation in GATED_ACTIVATIONS:
        gate, up = jnp.split(pre_activation, 2, axis=1)
        return GATED_ACTIVATIONS[activation](gate) * up
    return PLAIN_ACTIVATIONS[activation](pre_activation)
