"""Who computes the operations, and how. Those that are not part of JAX are in peers.py.

A contender is a class with a name and `start`, which compiles one operation. To add one, write it
and list it in `matmul.CONTENDERS`.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

import jax_ep
from jax_ep.bench.cases import Operands
from jax_ep.bench.timing import Completion, jax_completion

Computation = Callable[[Operands], jax.Array]


@dataclasses.dataclass(frozen=True)
class Started:
    """An operation that is ready to be timed.

    Attributes:
      call: enqueues it with one of `arguments` and returns its result.
      arguments: as made from the operands of the case.
      completion: how to wait for a result.
      to_jax: the result as a JAX array.
      facts: what the report should have: JSON values.
    """

    call: Callable[[Any], Any]
    arguments: list[Any]
    completion: Completion = jax_completion
    to_jax: Callable[[Any], jax.Array] = lambda result: result
    facts: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])


class Contender(Protocol):
    """One way to compute the operations; `name` is for reports and --contender."""

    name: str

    def start(self, operation: str, operands: list[Operands]) -> Started:
        """Compiles `operation`; raises where it cannot be computed."""
        ...


def start_jax(computation: Callable[[Any], jax.Array], arguments: list[Any]) -> Started:
    """A JAX function that is compiled by itself: nothing else is in its program."""
    compiled = jax.jit(computation).lower(arguments[0]).compile()
    return Started(compiled, arguments, facts={"custom_calls": custom_calls(compiled)})


def custom_calls(compiled: Any) -> dict[str, int]:
    """How often each custom call is in a compiled program: evidence of what it runs."""
    targets = re.findall(r'custom_call_target="([^"]*)"', compiled.as_text() or "")
    return dict(collections.Counter(targets))


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
