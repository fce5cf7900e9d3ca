"""remat="dispatch" with transfers in flight: the backward pass of the experts between them.

Sending x again is hidden by the gradients of rows, which need no rows. These return to their tokens
beside the gradients of the matrices.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from jax_ep._src.matmul.accumulation import Accumulators
from jax_ep._src.mlp.epilogue_mlp import experts_backward, rows_backward
from jax_ep._src.mlp.experts import Experts
from jax_ep._src.moe.params import COMBINE_LANE, DISPATCH_LANE, MoeMlpParams
from jax_ep._src.transfer.gradients_in_flight import (
    redispatch_done,
    redispatch_start,
    sums_done,
    sums_start,
)
from jax_ep._src.transfer.in_flight import overlap
from jax_ep._src.transfer.plan import Plan


def gradients_in_flight(
    params: MoeMlpParams,
    residuals: tuple[jax.Array, Experts, Plan, jax.Array, jax.Array | None],
    y_bar: jax.Array,
    accumulators: Accumulators,
) -> tuple[jax.Array, jax.Array | None, Experts]:
    """Returns the gradients of x, routing weights and experts."""
    x, experts, plan, pre_activation, row_weights = residuals
    group_sizes = experts.group_sizes(plan.group_sizes)
    beside = params.beside(1).mlp

    def of_rows(y_bar: jax.Array, *residuals: Any) -> Any:
        experts, row_weights, pre_activation = residuals
        operands = experts, group_sizes, row_weights, pre_activation
        return rows_backward(beside, operands, y_bar)

    def of_experts(y_bar: jax.Array, accumulators: Accumulators, *residuals: Any) -> Experts:
        rows, experts, row_weights, kept = residuals
        operands = rows, experts, group_sizes, row_weights, *kept
        return experts_backward(beside, operands, y_bar, accumulators)

    # Not before the cotangents have been sent.
    x, y_bar = lax.optimization_barrier((x, y_bar))
    sending = redispatch_start(x, plan.arrays, params.in_flight(DISPATCH_LANE))
    sending, (rows_bar, row_weights_bar, kept) = overlap(
        sending, of_rows, y_bar, experts, row_weights, pre_activation
    )
    rows = redispatch_done(sending)
    returning = sums_start(rows_bar, plan.arrays, row_weights_bar, params.in_flight(COMBINE_LANE))
    returning, experts_bar = overlap(
        returning, of_experts, y_bar, accumulators, rows, experts, row_weights, kept
    )
    return *sums_done(returning), experts_bar
