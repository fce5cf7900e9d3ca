"""The transfers of backward passes, in flight: of derivatives, and of layers that send x again.

They have no derivatives themselves.
"""

from __future__ import annotations

from typing import Any

import jax

from jax_ep._src.transfer.in_flight import InFlight
from jax_ep._src.transfer.params import TransferParams
from jax_ep._src.transfer.plan import PlanArrays
from jax_ep._src.transfer.start_primitives import as_buffers, bind_done, bind_start


def redispatch_start(x: jax.Array, plan: PlanArrays, params: TransferParams) -> InFlight:
    """Starts to send x [T, H] along the plan."""
    return _start("redispatch", (x, plan), params)


def redispatch_done(in_flight: InFlight) -> jax.Array:
    """Returns the rows [M, H]."""
    (rows,) = _done(in_flight)
    return rows


def sums_start(
    rows_bar: jax.Array,
    plan: PlanArrays,
    row_weights_bar: jax.Array | None,
    params: TransferParams,
) -> InFlight:
    """Starts to return the gradients of rows [M, H] and of row weights [M] to their tokens."""
    return _start("combine", (rows_bar, plan, row_weights_bar), params)


def sums_done(in_flight: InFlight) -> tuple[jax.Array, jax.Array | None]:
    """Returns the gradients of tokens [T, H] and of their routing weights [T, K]."""
    x_bar, *weights_bar = _done(in_flight)
    return x_bar, weights_bar[0] if weights_bar else None


def _start(operation: str, operands: Any, params: TransferParams) -> InFlight:
    operands = as_buffers(operands)
    leaves = jax.tree.leaves(operands)
    results = bind_start(operation, leaves, params, **_flags(operation, operands))
    return InFlight(operands, results, operation, params, link=None)


def _done(in_flight: InFlight) -> list[jax.Array]:
    operation, operands = in_flight.operation, in_flight.operands
    leaves, params = jax.tree.leaves(operands), in_flight.params
    return bind_done(
        operation, in_flight.results, leaves, params, plan=(), **_flags(operation, operands)
    )


def _flags(operation: str, operands: Any) -> dict[str, bool]:
    if operation == "redispatch":
        return {}
    return {"has_weights": False, "has_scalars": operands[2] is not None}
