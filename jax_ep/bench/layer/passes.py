"""The passes of a layer: forward, and forward with backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jax_ep.bench.common.benchmark import Case, Started
from jax_ep.bench.common.programs import start_sharded
from jax_ep.bench.layer.problem import Operands, Problem

Layer = Callable[..., jax.Array]


def arguments_of(operation: str, operands: Operands) -> tuple[Any, ...]:
    """Returns the arguments of `pass_of`. In a chain, each call waits for the first."""
    x, out_bar, ids, *floats = operands
    return ((x, ids), *floats) if operation == "forward" else ((x, ids), out_bar, *floats)


def pass_of(operation: str, layer: Layer) -> Callable[..., Any]:
    """Returns a function that computes the layer's result, or that and all gradients.

    Its first argument is x and what has no gradient.
    """

    def forward(routed: Any, *floats: Any) -> Any:
        return layer(*routed, *floats)

    def both(routed: Any, out_bar: Any, *floats: Any) -> Any:
        x, *constants = routed
        out, backward = jax.vjp(lambda x, *floats: layer(x, *constants, *floats), x, *floats)
        return out, backward(out_bar)

    return forward if operation == "forward" else both


def start_layer(
    layer: Layer,
    case: Case,
    problem: Problem,
    evidence: str | None,
    *constants: Any,
    check_vma: bool = True,
) -> Started:
    """Compiles a pass of a layer by itself, over all ranks.

    `constants` come after the layer's x and ids. They have no gradient.
    """
    arguments: list[tuple[Any, ...]] = []
    for operands in problem.sets:
        routed, *others = arguments_of(case.operation, operands)
        arguments.append(((*routed, *constants), *others))
    compute = pass_of(case.operation, layer)
    return start_sharded(
        compute, arguments, problem.mesh, case.chained, evidence, check_vma=check_vma
    )
