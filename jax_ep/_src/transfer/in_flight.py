"""Transfers in flight: what a start returns, and what runs before done."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jax_ep._src.core import checks
from jax_ep._src.core.errors import ArgumentError, DtypeError
from jax_ep._src.transfer.params import NUM_LANES
from jax_ep._src.transfer.plan import PlanArrays

_STATIC = {"static": True}


class Link:
    """Hands the plan of a gradient in flight from where it starts to where it ends.

    Both read the same arrays, which XLA then keeps in one place. They are integers, and so have no
    cotangents, in which they could go from done, where it starts, to start. Residuals of the two
    would be slices of two arrays in the backward pass of a loop.
    """

    def __init__(self) -> None:
        self._plans: list[PlanArrays] = []

    def give(self, plan: PlanArrays) -> None:
        """Called where the gradient's transfer starts, for the call of `take` that follows."""
        self._plans.append(plan)

    def take(self) -> PlanArrays:
        """Called where it ends, in the same trace."""
        return self._plans.pop()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class InFlight:
    """A transfer that `dispatch_start` or `combine_start` has started: a pytree for done.

    Its arrays may be written until done returns them, so nothing but done may read them.

    Attributes:
      operation: ``"dispatch"``, ``"combine"``, or within a backward pass ``"redispatch"`` (static).
      operands: private; what the transfer reads.
      results: private; what it writes.
      params: private (static).
      link: private (static).
    """

    operands: Any
    results: Any
    operation: str = dataclasses.field(metadata=_STATIC)
    params: Any = dataclasses.field(metadata=_STATIC)  # TransferParams
    link: Any = dataclasses.field(metadata=_STATIC)  # Link, or None within a backward pass


def overlap[I: InFlight | tuple[InFlight, ...], R](
    in_flight: I, function: Callable[..., R], *arguments: Any
) -> tuple[I, R]:
    """Calls a function between the start and the done of a transfer, so that both run at once.

    XLA may compute anything that depends on neither before the one or after the other. This puts
    the function between them: its arguments are there after start only, and done waits for its
    results. In the backward pass its gradient runs beside the transfer of the gradient. Arrays that
    the function closes over instead of taking as arguments do not hold it back.

    The kernels of a transfer in flight take at most a quarter of the SMs, and `num_sms` of them if
    that is less. A matmul of jax_ep beside them should leave these free by its own `num_sms`,
    because it would hold every SM until it ends. Whole layers run at the power limit of a GPU,
    where what runs beside something else slows it down: measure.

    In a `shard_map` over ``"expert"``, with a shared expert in between::

        sending = jax_ep.dispatch_start(
            x, topk_ids, topk_weights, axis_name="expert", num_experts=16
        )
        sending, shared = jax_ep.overlap(sending, lambda x: x @ x.T @ x, x)
        sent = jax_ep.dispatch_done(sending)
        out = jax_ep.combine(sent.rows, sent.plan, sent.row_weights) + shared

    Args:
      in_flight: what start returned, or a tuple of these; use the returned one in its place.
      function: any function of arrays. It must not call done for this transfer. It may start
        others, in other lanes.
      *arguments: pytrees of arrays, for the function.

    Returns:
      The transfer, for done, and the function's result.

    Raises:
      DtypeError (a TypeError): in_flight is something else.
    """
    for each in in_flight if isinstance(in_flight, tuple) else (in_flight,):
        check_in_flight("overlap", each)
    arguments, in_flight = lax.optimization_barrier((arguments, in_flight))
    result = function(*arguments)
    result, in_flight = lax.optimization_barrier((result, in_flight))
    return in_flight, result


def check_in_flight(operation: str, in_flight: InFlight, started: str | None = None) -> None:
    """Raises unless it is a transfer in flight, and the one of this name."""
    expected = "dispatch_start or combine_start" if started is None else f"{started}_start"
    if not isinstance(in_flight, InFlight):
        raise DtypeError(
            f"jax_ep.{operation}: in_flight is a {type(in_flight).__name__}; expected the "
            f"jax_ep.InFlight that {expected} returned. Start the transfer first."
        )
    if started not in (None, in_flight.operation):
        raise ArgumentError(
            f"jax_ep.{operation}: in_flight is a {in_flight.operation}; expected a {started}. Use "
            f"jax_ep.{in_flight.operation}_done."
        )


def check_lane(operation: str, lane: int) -> int:
    """Returns the lane of a transfer in flight, or raises."""
    lane = checks.integer(operation, "lane", lane)
    if lane >= NUM_LANES:
        raise ArgumentError(
            f"jax_ep.{operation}: lane={lane}; expected 1 to {NUM_LANES - 1}. In one lane several "
            "transfers can be in flight, one after another."
        )
    return lane
