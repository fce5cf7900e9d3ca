"""Experts that the user computes between dispatch and combine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jax_ep._src.core import checks, compat
from jax_ep._src.core.errors import ArgumentError
from jax_ep._src.matmul.accumulation import NO_ACCUMULATORS
from jax_ep._src.moe.moe_experts import Outputs, send
from jax_ep._src.moe.params import MoeMlpParams
from jax_ep._src.transfer.combine import checked_combine

ExpertsFunction = Callable[..., jax.Array]
"""Of rows [M, H], group_sizes int32[L], w_up, w_down and any adapters; returns [M, any size]."""


def check_experts_function(operation: str, function: Any, **others: Any) -> None:
    """Raises unless it may be called, and none of the others is given, which it does not get."""
    if not callable(function):
        raise ArgumentError(
            f"jax_ep.{operation}: experts_fn is a {type(function).__name__}; expected a function "
            "from (rows, group_sizes, w_up, w_down) to the experts' outputs [M, H]."
        )
    for name, value in others.items():
        if value is not None:
            raise ArgumentError(
                f"jax_ep.{operation}: {name} is given with experts_fn, which gets w_up and w_down "
                "alone; expected None. Put what the function needs into w_up: it may be any pytree."
            )


def check_adapters(operation: str, adapters: Any, function: Any) -> None:
    """Raises for adapters that no function gets."""
    if adapters is not None and function is None:
        raise ArgumentError(
            f"jax_ep.{operation}: adapters are given without experts_fn; expected both or none. "
            "Give the function from (rows, group_sizes, w_up, w_down, adapters) that applies them."
        )


def users_experts(
    function: ExpertsFunction,
    weights: tuple[Any, ...],
    x: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
    *,
    experts: None,
    remat: str | None,
    params: MoeMlpParams,
) -> Outputs:
    """Returns the tokens' sums of the function's outputs. JAX differentiates the function."""

    def compute(x: jax.Array, topk_weights: jax.Array | None, weights: tuple[Any, ...]) -> Any:
        rows, row_weights, plan = send(x, topk_ids, topk_weights, params)
        y = function(rows, plan.group_sizes, *weights)
        checks.rows("moe_mlp", "experts_fn's result", y, (rows.shape[0], "hidden"))
        # The weights are the user's, and may vary over more axes than the tokens do.
        return compat.vary_together((y, row_weights, plan))

    if remat == "experts":
        compute = compat.checkpoint(compute)
    y, row_weights, plan = compute(x, topk_weights, weights)
    return checked_combine(y, plan, row_weights, params.transfer), plan, NO_ACCUMULATORS
