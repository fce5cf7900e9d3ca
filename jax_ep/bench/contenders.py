"""Who computes the operations, and how. Those that are not part of JAX are in peers.py.

A contender is a class with a name and `start`, which compiles one operation. To add one, write it
and list it in `matmul.CONTENDERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp

import jax_ep
from jax_ep.bench.cases import Operands
from jax_ep.bench.measure import Started, start_jax

Computation = Callable[[Operands], jax.Array]


class Contender(Protocol):
    """One way to compute the operations; `name` is for reports and --contender."""

    name: str

    def start(self, operation: str, operands: list[Operands]) -> Started:
        """Compiles `operation`; raises where it cannot be computed."""
        ...


class Ours:
    """jax_ep.grouped_matmul; on a GPU its kernels or an error."""

    name = "jax_ep"

    def start(self, operation: str, operands: list[Operands]) -> Started:
        """Compiles one grouped matmul."""
        return start_jax(self.computation(operation), operands)

    def computation(self, operation: str) -> Computation:
        """What is compiled."""
        implementation = "cuda" if jax.default_backend() == "gpu" else None

        def forward(x: Operands) -> jax.Array:
            return jax_ep.grouped_matmul(x.lhs, x.rhs, x.sizes, implementation=implementation)

        def input_gradient(x: Operands) -> jax.Array:
            return jax_ep.grouped_matmul(
                x.out_gradient, x.rhs, x.sizes, transpose_rhs=True, implementation=implementation
            )

        return {
            "forward": forward,
            "input_gradient": input_gradient,
            "weight_gradient": gradient(forward, "rhs"),
        }[operation]


class RaggedDot:
    """jax.lax.ragged_dot and its gradients."""

    name = "lax.ragged_dot"

    def start(self, operation: str, operands: list[Operands]) -> Started:
        """Compiles one ragged dot."""
        return start_jax(self.computation(operation), operands)

    def computation(self, operation: str) -> Computation:
        """What is compiled."""

        def forward(x: Operands) -> jax.Array:
            return jax.lax.ragged_dot(x.lhs, x.rhs, x.sizes)

        return {
            "forward": forward,
            "input_gradient": gradient(forward, "lhs"),
            "weight_gradient": gradient(forward, "rhs"),
        }[operation]


class Dense:
    """jnp.dot of as many rows with one matrix: the same products, with nothing to group."""

    name = "dense"

    def start(self, operation: str, operands: list[Operands]) -> Started:
        """Compiles one dense matmul with the first group's matrix."""
        dense = [x._replace(rhs=jax.block_until_ready(x.rhs[0])) for x in operands]
        return start_jax(self.computation(operation), dense)

    def computation(self, operation: str) -> Computation:
        """What is compiled; rhs is [k, n]."""
        computations: dict[str, Computation] = {
            "forward": lambda x: jnp.dot(x.lhs, x.rhs),
            "input_gradient": lambda x: jnp.dot(x.out_gradient, x.rhs.T),
            "weight_gradient": lambda x: jnp.dot(x.lhs.T, x.out_gradient),
        }
        return computations[operation]


def gradient(forward: Computation, argument: str) -> Computation:
    """The gradient of `forward` in one argument alone; what else it computes is dead code."""

    def backward(x: Operands) -> jax.Array:
        _, pull_back = jax.vjp(
            lambda value: forward(x._replace(**{argument: value})), getattr(x, argument)
        )
        return pull_back(x.out_gradient)[0]

    return backward
