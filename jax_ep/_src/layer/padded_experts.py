"""Slots for experts: as many on every rank. Those past the last expert are padding.

No token is routed to padding, so that its parameters, zeros, get gradients of zero. Routers, losses
and counts know of E experts only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jax_ep._src.core import checks
from jax_ep._src.core.errors import ArgumentError
from jax_ep._src.layer.config import Config, spec_entry
from jax_ep._src.layer.router import LAYER

Initialize = Callable[..., jax.Array]


def num_padded_experts(config: Config, mesh: Mesh | AbstractMesh | None) -> int:
    """Returns the leading size of the experts' parameters: E, or the next multiple of the ranks."""
    num_ranks = 1 if mesh is None else _num_ranks(config, mesh)
    return -(-config.num_experts // num_ranks) * num_ranks


def check_padding(config: Config, mesh: Mesh | AbstractMesh, w_down: Any, axis: int) -> None:
    """Raises unless the ranks of the expert axis have equally many of w_down's experts."""
    if w_down is None:  # quantized ones are checked as such
        return
    manual = math.prod(
        mesh.shape[name]
        for name in config.axes_on(mesh).expert
        if name in mesh.abstract_mesh.manual_axes
    )
    given, num_ranks = w_down.shape[axis], _num_ranks(config, mesh)
    expected, total = num_padded_experts(config, mesh), given * manual
    # Those padded for another mesh are fine. Too many are those of all ranks on each of them.
    divides = total % num_ranks == 0 and config.num_experts <= total < 2 * config.num_experts
    if total == expected or divides:
        return
    where = "on each rank" if manual > 1 else "in all"
    raise ArgumentError(
        f"jax_ep.{LAYER}: w_up and w_down have {given} experts {where}, with "
        f"num_experts={config.num_experts} over the {num_ranks} ranks of mesh axis "
        f"{spec_entry(config.axes_on(mesh).expert)!r}; expected {expected // manual}, equally many "
        "on every rank, with zeros past num_experts. Make the layer where its mesh is known "
        "(mesh=, or under jax.set_mesh), or pad the parameters of its experts."
    )


def local_padded(w_down: Any, quantized: Any, *, is_stack: bool) -> int:
    """Returns the leading size of this rank's matrices."""
    matrix = quantized[1].layouts[0] if w_down is None else w_down
    return int(matrix.shape[1 if is_stack else 0])


def _num_ranks(config: Config, mesh: Mesh | AbstractMesh) -> int:
    return math.prod(mesh.shape[name] for name in config.axes_on(mesh).expert)


def padded_adapters(
    config: Config, adapters: Any, count: int, whole: Callable[[jax.Array], jax.Array]
) -> Any:
    """Returns adapters of as many experts as w_down has here, with zeros past the last expert.

    `whole` gathers an array that is sharded over Explicit axes, which E does not divide.
    """

    def padded(array: Any) -> jax.Array:
        checks.array(LAYER, "adapters", array)
        if array.shape[:1] == (config.num_experts,) and count > config.num_experts:
            array = whole(array)
            return jnp.pad(array, ((0, count - len(array)), *((0, 0),) * (array.ndim - 1)))
        checks.shape(LAYER, "adapters", array, (count, *array.shape[1:]))
        return array

    return jax.tree.map(padded, adapters)


# ---- initial values


def keys_of_experts(key: jax.Array, shape: tuple[int, ...], num_experts: int) -> jax.Array:
    """Returns keys by expert, which do not depend on the padding."""
    keys = jax.random.split(key, (min(shape[0], num_experts), *shape[1:]))
    return keys[jnp.minimum(jnp.arange(shape[0]), num_experts - 1)]


def without_padding(values: jax.Array, num_experts: int) -> jax.Array:
    """Returns zeros past the last expert."""
    if values.shape[0] <= num_experts:
        return values
    is_expert = jnp.arange(values.shape[0]) < num_experts
    return jnp.where(is_expert.reshape(-1, *(1,) * (values.ndim - 1)), values, 0)


@functools.cache
def padded(initializer: Initialize, num_experts: int) -> Initialize:
    """Initializes the parameters of E experts by one call, and pads them."""

    def initialize(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        num_real = min(shape[0], num_experts)
        values = initializer(key, (num_real, *shape[1:]), dtype)
        return jnp.pad(values, ((0, shape[0] - num_real), *((0, 0),) * (len(shape) - 1)))

    return initialize
