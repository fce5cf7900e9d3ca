"""The passes of a layer: forward, and forward with backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jax_ep.bench.layer_problem import Operands

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
