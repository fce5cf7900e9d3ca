"""The forms in which users give the parameters of experts."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jax_ep._src.core import checks
from jax_ep._src.core.errors import ArgumentError
from jax_ep._src.matmul.activations import (
    GATED_ACTIVATIONS,
    PLAIN_ACTIVATIONS,
    Activation,
    NamedActivation,
    has_gate,
    takes_gate_and_up,
)

UpWeights = jax.Array | tuple[jax.Array, jax.Array]
"""[L, H, 2, F], [L, H, 2F] (gate first) or a (gate, up) pair of [L, H, F]; plain: [L, H, F]."""

UpBiases = jax.Array | tuple[jax.Array, jax.Array] | None
"""As `UpWeights`, without H."""


def check_activation(operation: str, activation: Activation) -> bool | None:
    """Returns whether it is gated; None for a function of one array, which may be either."""
    if isinstance(activation, NamedActivation):
        if has_gate(activation):
            return True
        if activation in PLAIN_ACTIVATIONS:
            return False
    elif callable(activation) and not isinstance(activation, type):
        return True if takes_gate_and_up(activation) else None
    raise ArgumentError(
        f"jax_ep.{operation}: activation={activation!r} is not known; expected one of "
        f"{tuple(GATED_ACTIVATIONS)} (gated), one of {tuple(PLAIN_ACTIVATIONS)} (plain), a "
        "jax_ep.ClampedSwiGlu(), or a function from float32 [M, 2, F], [M, F], or gate and up "
        "[M, F], to [M, F]."
    )


def kind_of(activation: Activation) -> str:
    if not isinstance(activation, NamedActivation):
        arguments = " of (gate, up)" if takes_gate_and_up(activation) else ""
        return f"a function{arguments} as the activation"
    kind = "gated" if has_gate(activation) else "plain"
    return f"activation={activation!r}, which is {kind}"


def check_down(operation: str, w_down: jax.Array, hidden: int) -> None:
    checks.array(operation, "w_down", w_down)
    if w_down.ndim == 4:
        raise ArgumentError(
            f"jax_ep.{operation}: w_down has shape {w_down.shape}; expected [local experts, "
            f"intermediate size, {hidden}]. Give layer= to use one layer of a stack."
        )
    if w_down.ndim == 3 and w_down.shape[2] != hidden and w_down.shape[1] == hidden:
        raise ArgumentError(
            f"jax_ep.{operation}: w_down has shape {w_down.shape}; expected [local experts, "
            f"intermediate size, {hidden}]. Swap its last two axes: w_down.swapaxes(1, 2)."
        )
    checks.shape(operation, "w_down", w_down, ("local experts", "intermediate size", hidden))


def check_forms(
    operation: str,
    name: str,
    given: UpWeights,
    lead: tuple[int, ...],
    size: int,
    is_gated: bool | None,
    kind: str,
    down: str = "w_down",
) -> tuple[tuple[jax.Array, ...], bool]:
    """The arrays in the form in which they are given, and whether they are gated.

    `down` is the name of the matrices that decide about F, which is `size`.
    """
    arrays = tuple(given) if isinstance(given, tuple | list) else (given,)
    for array in arrays:
        checks.array(operation, name, array)
    shapes = tuple(array.shape for array in arrays)
    gated_forms = {((*lead, 2, size),), ((*lead, 2 * size),), ((*lead, size), (*lead, size))}
    found = True if shapes in gated_forms else False if shapes == ((*lead, size),) else None
    if found is None or is_gated not in (None, found):
        gated = (
            f"[{_sizes(*lead, 2, size)}], [{_sizes(*lead, 2 * size)}] with the gate first, or a "
            f"(gate, up) pair of [{_sizes(*lead, size)}]"
        )
        plain = f"[{_sizes(*lead, size)}]"
        forms = {True: gated, False: plain, None: f"{plain} or gated {gated}"}[is_gated]
        raise ArgumentError(
            f"jax_ep.{operation}: {name} has shape {_shapes(shapes)} with {kind}, and {down} has "
            f"F={size}; expected {forms}. {_advice(name, shapes, lead, size, found)}"
        )
    return arrays, found


def flatten_forms(arrays: tuple[jax.Array, ...], lead: tuple[int, ...]) -> jax.Array:
    """The arrays that `check_forms` returned as one: [*lead, 2F] or [*lead, F]."""
    flat = arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis=-1)
    columns = flat.shape[len(lead) :]
    return flat if len(columns) == 1 else flat.reshape(*lead, math.prod(columns))


def _advice(
    name: str,
    shapes: tuple[tuple[int, ...], ...],
    lead: tuple[int, ...],
    size: int,
    found: bool | None,
) -> str:
    if found is not None:
        fitting = GATED_ACTIVATIONS if found else PLAIN_ACTIVATIONS
        return f"That shape fits a {'gated' if found else 'plain'} activation: {tuple(fitting)}."
    transposed = [shape[:1] + shape[:0:-1] for shape in shapes]
    if len(lead) == 2 and {(*lead, 2 * size), (*lead, size)} & {*transposed[:1]}:
        return f"Swap its last two axes: {name}.swapaxes(1, 2)."
    return "Inside shard_map these are the shapes of one rank."


def _sizes(*sizes: int) -> str:
    return ", ".join(map(str, sizes))


def _shapes(shapes: tuple[tuple[int, ...], ...]) -> str:
    return str(shapes[0]) if len(shapes) == 1 else " and ".join(map(str, shapes))


def flat_function(operation: str, function: Activation, size: int, is_gated: bool) -> Activation:
    """`function` as one from [M, N], with its result checked."""
    assert callable(function)
    takes_two = takes_gate_and_up(function)

    def flat(pre_activation: jax.Array) -> jax.Array:
        num_rows = pre_activation.shape[0]
        given = pre_activation.reshape(num_rows, *((2, size) if is_gated else (size,)))
        result = function(given[:, 0], given[:, 1]) if takes_two else function(given)
        checks.array(operation, "activation's result", result)
        if result.shape != (num_rows, size):
            raise ArgumentError(
                f"jax_ep.{operation}: activation returned shape {result.shape} for {given.shape}; "
                f"expected {(num_rows, size)}. A function of gated weights combines both halves, "
                "as lambda h: jax.nn.silu(h[:, 0]) * h[:, 1] does; 'swiglu' is this function."
            )
        return result

    return flat
