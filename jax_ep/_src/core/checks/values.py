"""Checks of Python values: static sizes, counts and choices."""

from __future__ import annotations

import math
import operator
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_ep._src.core.errors import ArgumentError, DtypeError
from jax_ep._src.core.expert_axis import ExpertAxis

MAX_ROWS = 2**31 - 1
ADVICE = {
    "layer": "Layers are counted from 0: give an int, or an integer scalar on the device.",
    "num_sms": "Use None to let jax_ep choose.",
    "num_comm_sms": "Use None to let jax_ep choose.",
    "row_align": "Use 1 for no padding.",
    "recv_capacity": "Use None to drop nothing, or capacity_factor for a multiple of T * K rows.",
    "num_chunks": "Use 1 for a single call.",
    "max_records": "Each takes 16 bytes of device memory.",
    "num_experts": "Give E, the experts of all ranks.",
}


def integer(operation: str, name: str, value: Any, least: int = 1) -> int:
    """An int that is known while tracing."""
    advice = ADVICE.get(name, "Sizes are static: give a Python int.")
    try:
        number = operator.index(value)
    except TypeError as error:
        raise DtypeError(
            f"jax_ep.{operation}: {name}={value!r} is a {type(value).__name__}; expected an int. "
            f"{advice}"
        ) from error
    if number < least:
        raise ArgumentError(
            f"jax_ep.{operation}: {name}={number}; expected {least} or more. {advice}"
        )
    return number


def dtype(operation: str, name: str, value: Any) -> np.dtype[Any]:
    """A dtype that numpy knows."""
    try:
        return jnp.dtype(value)
    except TypeError as error:
        raise DtypeError(
            f"jax_ep.{operation}: {name}={value!r}; expected a dtype. Give one such as "
            "jnp.bfloat16."
        ) from error


def float_dtype(operation: str, name: str, value: Any, advice: str) -> np.dtype[Any]:
    """A dtype that rows and matrices may have before they are quantized."""
    found = dtype(operation, name, value)
    if not jnp.issubdtype(found, jnp.floating) or found.itemsize not in (2, 4):
        raise DtypeError(
            f"jax_ep.{operation}: {name}={found}; expected a float dtype of 16 or 32 bits. {advice}"
        )
    return found


def num_sms(operation: str, value: int | None, name: str = "num_sms") -> int:
    """The attribute's form: 0 lets the launch code choose."""
    return 0 if value is None else integer(operation, name, value)


def num_experts(operation: str, num_experts: int | None, axis: ExpertAxis) -> int:
    """A multiple of the number of ranks."""
    num_experts = integer(operation, "num_experts", num_experts, least=0)
    if num_experts < 1 or num_experts % axis.size:
        padded = max(1, -(-num_experts // axis.size)) * axis.size
        raise ArgumentError(
            f"jax_ep.{operation}: num_experts={num_experts} does not divide over the {axis.size} "
            f"ranks of axis {axis.name!r}; expected a positive multiple of {axis.size}. Pad the "
            f"expert weights to {padded} experts; an id that the router never gives costs nothing."
        )
    return num_experts


def capacity(
    operation: str, recv_capacity: int | None = None, capacity_factor: float | None = None
) -> None:
    """Raises unless at most one is given, and that one makes sense."""
    if recv_capacity is not None and capacity_factor is not None:
        raise ArgumentError(
            f"jax_ep.{operation}: recv_capacity={recv_capacity!r} and capacity_factor="
            f"{capacity_factor!r} are both given; expected at most one. Give the rows of a rank, "
            "or a multiple of T * K."
        )
    if recv_capacity is not None and (
        integer(operation, "recv_capacity", recv_capacity) > MAX_ROWS
    ):
        raise ArgumentError(
            f"jax_ep.{operation}: recv_capacity={recv_capacity}; expected at most {MAX_ROWS}, "
            f"as rows have int32 numbers. {ADVICE['recv_capacity']}"
        )
    if capacity_factor is None:
        return
    is_number = isinstance(capacity_factor, int | float | np.number)
    if not is_number or not 0 < capacity_factor < math.inf:
        raise ArgumentError(
            f"jax_ep.{operation}: capacity_factor={capacity_factor!r}; expected a positive number. "
            "Give a factor such as 1.25, or None to drop nothing."
        )


def num_chunks(operation: str, num_chunks: int, num_tokens: int) -> None:
    """Raises unless the tokens divide into so many chunks."""
    integer(operation, "num_chunks", num_chunks)
    if num_chunks > max(1, num_tokens) or num_tokens % num_chunks:
        raise ArgumentError(
            f"jax_ep.{operation}: num_chunks={num_chunks} with {num_tokens} tokens per rank; "
            "expected a divisor of the tokens. Pad the tokens (ids of -1 cost nothing), or choose "
            "another number."
        )


def remat(operation: str, remat: str | None) -> None:
    """Raises unless it is a known way to save memory."""
    if remat not in (None, "dispatch", "experts"):
        raise ArgumentError(
            f"jax_ep.{operation}: remat={remat!r}; expected 'dispatch', 'experts' or None. For "
            "other policies wrap the layer in jax.checkpoint with jax_ep.REMAT_NAMES."
        )
