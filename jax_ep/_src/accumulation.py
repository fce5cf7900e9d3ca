"""Accumulates the gradients of matrices that several calls use, in float32, inside of the kernels.

JAX adds the gradients of all uses of an array. Each is an array of its own, in the array's dtype.
Calls that share a matrix form a chain instead. Each call takes a stand-in for an accumulator and
passes it on to the next call. The cotangent of what it passes on holds the gradients of all later
calls, and its kernel adds its own gradient in place.
"""

from __future__ import annotations

import enum
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep._src import compat


class Accumulation(enum.Enum):
    """Says what a call does with the gradients of its matrices.

    The last call of a chain is the first in the backward pass.
    """

    NONE = "none"  # they are results, in the matrices' dtypes
    FIRST = "first"  # they become the accumulators
    NEXT = "next"  # they are added to the accumulators

    @property
    def passes_on(self) -> bool:
        """Whether the call returns its stand-ins, for a later call."""
        return self is Accumulation.NEXT

    def dtype(self, matrix: jax.Array) -> Any:
        """The dtype of the gradient of `matrix`."""
        return matrix.dtype if self is Accumulation.NONE else jnp.dtype(jnp.float32)


class Accumulators(NamedTuple):
    """Stand-ins in the forward pass, float32 accumulators as their cotangents; None: no chain."""

    w_up: jax.Array | None
    w_down: jax.Array | None


NO_ACCUMULATORS = Accumulators(None, None)


def stand_in(matrix: jax.Array) -> jax.Array:
    """Returns the stand-in for the accumulator of `matrix`: zeros, which XLA removes as unused.

    Its cotangent, cast to the matrix's dtype, is the gradient of `matrix`.
    """
    return _stand_in(matrix, jnp.dtype(matrix.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _stand_in(matrix: jax.Array, dtype: Any) -> jax.Array:
    return compat.vary_over(jnp.zeros(matrix.shape, jnp.float32), compat.varying_axes(matrix))


def _forward(matrix: jax.Array, dtype: Any) -> tuple[jax.Array, None]:
    return _stand_in(matrix, dtype), None


def _backward(dtype: Any, _: None, accumulator: jax.Array) -> tuple[jax.Array]:
    return (accumulator.astype(dtype),)


_stand_in.defvjp(_forward, _backward)
