"""The activations that have a name, on float32."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import numbers
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_ep._src.core.errors import ArgumentError

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


@dataclasses.dataclass(frozen=True)
class ClampedSwiGlu:
    """The gated activation of gpt-oss, compared and hashed by value.

    ``gate * sigmoid(alpha * gate) * (up + 1)``, in which gate is at most `limit`, and up between
    -limit and limit.

    For example::

        options = {"activation": jax_ep.ClampedSwiGlu(), "use_bias": True, "logits_bias": True}
        layer = jax_ep.nnx.MoE(128, 128, 8, 2, **options, rngs=nnx.Rngs(0))

    Attributes:
      limit: a positive number.
      alpha: a positive number.
    """

    limit: float = 7.0
    alpha: float = 1.702

    def __post_init__(self) -> None:
        for name in "limit", "alpha":
            value = getattr(self, name)
            if not (isinstance(value, numbers.Real) and float(value) > 0):
                raise ArgumentError(
                    f"jax_ep.ClampedSwiGlu: {name}={value!r}; expected a positive number. "
                    "Activations are static: give a Python float such as 7.0."
                )
            object.__setattr__(self, name, float(value))


NamedActivation = str | ClampedSwiGlu
"""Hashed by value, so that static parameters may have it."""

Activation = NamedActivation | Callable[..., jax.Array]
"""A name, a `ClampedSwiGlu`, or a function: of (gate, up), or of one array."""


def takes_gate_and_up(function: Callable[..., jax.Array]) -> bool:
    """Whether a function has two arguments without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have no signature
        return False
    positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    required = [p for p in parameters if p.kind in positional and p.default is p.empty]
    return len(required) == 2


def has_gate(activation: NamedActivation) -> bool:
    """Whether it has a gate."""
    return isinstance(activation, ClampedSwiGlu) or activation in GATED_ACTIVATIONS


def num_outputs(activation: NamedActivation, num_columns: int) -> int:
    """F, the columns of the activations of a pre-activation with N columns."""
    return num_columns // 2 if has_gate(activation) else num_columns


def activate(activation: NamedActivation, pre_activation: jax.Array) -> jax.Array:
    """[M, N] -> [M, F]. For a gated activation, the first F columns are the gate."""
    if not has_gate(activation):
        assert isinstance(activation, str)
        return PLAIN_ACTIVATIONS[activation](pre_activation)
    gate, up = jnp.split(pre_activation, 2, axis=1)
    if isinstance(activation, str):
        return GATED_ACTIVATIONS[activation](gate) * up
    gate = jnp.minimum(gate, activation.limit)
    up = jnp.clip(up, -activation.limit, activation.limit)
    return gate * jax.nn.sigmoid(activation.alpha * gate) * (up + 1)


def activate_backward(
    activation: NamedActivation,
    activations_bar: jax.Array,
    pre_activation: jax.Array,
    row_weights: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what follows from the gradient of `activate` times row weights, in float32.

    These are the gradient of the pre-activation [M, N], the activations [M, F] times row weights,
    and products [M, F], whose sums over F are the gradients of the row weights.
    """
    activations_bar = activations_bar.astype(jnp.float32)
    activations, pull_back = jax.vjp(
        functools.partial(activate, activation), pre_activation.astype(jnp.float32)
    )
    products = activations * activations_bar
    if row_weights is not None:
        activations, activations_bar = (
            a * row_weights[:, None] for a in (activations, activations_bar)
        )
    (pre_activation_bar,) = pull_back(activations_bar)
    return pre_activation_bar, activations, products
