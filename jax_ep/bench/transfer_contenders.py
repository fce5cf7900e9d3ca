"""Who dispatches and combines, and how.

A contender is a class with a name, its operations, and `start`, which compiles one of them. To add
one, write it and list it in `CONTENDERS`. The report compares all with one named "ceiling".

What other contenders than jax_ep send is laid out, counted and cut beforehand, so that only the
transfer itself is timed. The tokens' values do not matter to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax

import jax_ep
from jax_ep._src import compat
from jax_ep.bench.ceiling import Ceiling
from jax_ep.bench.measure import Started
from jax_ep.bench.ragged import ragged_operands
from jax_ep.bench.report import OURS
from jax_ep.bench.transfer_cases import OPERATIONS
from jax_ep.bench.transfer_check import check_combine, check_dispatch
from jax_ep.bench.transfer_problem import AXIS, Problem, sharded, start_sharded

# Collectives have no metadata to leave out: their dispatch is one by plan already.
OF_COLLECTIVES: tuple[str, ...] = ("dispatch", "combine")


class Contender(Protocol):
    """One way to transfer; `name` is for reports and --contender."""

    name: str
    operations: tuple[str, ...]

    def start(self, operation: str, problem: Problem, chained: int) -> Started:
        """Compiles `chained` calls of `operation`; raises where it cannot run."""
        ...


class Ours:
    """jax_ep.dispatch and combine; on GPUs their kernels or an error.

    With `num_sms` they may use that many multiprocessors. The first set's results are checked.
    """

    operations = OPERATIONS

    def __init__(self, num_sms: int | None = None) -> None:
        self.num_sms = num_sms
        self.name = OURS if num_sms is None else f"{OURS} {num_sms} SMs"

    def start(self, operation: str, problem: Problem, chained: int) -> Started:
        """Compiles one operation and checks its result."""
        evidence = f"jax_ep.{operation}.v1" if jax.default_backend() == "gpu" else None
        arguments = self._arguments(operation, problem)
        started = start_sharded(
            self.transfer(operation, problem), arguments, problem.mesh, chained, evidence
        )
        result = started.call(arguments[0])
        if operation == "combine":
            check_combine(result, problem.sets[0])
        else:
            check_dispatch(result, problem.sets[0], problem.routes)
        started.facts.update(checked=True, num_sms=self.num_sms)
        return started

    def transfer(self, operation: str, problem: Problem) -> Callable[..., Any]:
        """What is compiled, of one rank's arrays."""
        implementation = "cuda" if jax.default_backend() == "gpu" else None

        def dispatch(
            x: jax.Array, topk_ids: jax.Array, topk_weights: jax.Array
        ) -> jax_ep.Dispatched:
            return jax_ep.dispatch(
                x,
                topk_ids,
                topk_weights,
                num_experts=problem.shape.experts,
                axis_name=AXIS,
                recv_capacity=problem.routes.recv_capacity,
                zero_tail=False,
                num_sms=self.num_sms,
                implementation=implementation,
            )

        def redispatch(
            x: jax.Array, plan: jax_ep.Plan, topk_weights: jax.Array
        ) -> jax_ep.Dispatched:
            return jax_ep.redispatch(
                x, plan, topk_weights, num_sms=self.num_sms, implementation=implementation
            )

        def combine(rows: jax.Array, plan: jax_ep.Plan, row_weights: jax.Array) -> jax.Array:
            return jax_ep.combine(
                rows, plan, row_weights, num_sms=self.num_sms, implementation=implementation
            )

        transfers: dict[str, Callable[..., Any]] = {
            "dispatch": dispatch,
            "redispatch": redispatch,
            "combine": combine,
        }
        return transfers[operation]

    def _arguments(self, operation: str, problem: Problem) -> list[tuple[Any, ...]]:
        if operation == "dispatch":
            return [tuple(operands) for operands in problem.sets]
        dispatch = jax.jit(sharded(self.transfer("dispatch", problem), problem.mesh))
        arguments = []
        for operands in problem.sets:
            dispatched = jax.block_until_ready(dispatch(*operands))
            arguments.append(
                (dispatched.rows, dispatched.plan, dispatched.row_weights)
                if operation == "combine"
                else (operands.x, dispatched.plan, operands.topk_weights)
            )
        return arguments


class RaggedAllToAll:
    """jax.lax.ragged_all_to_all of all (token, expert) rows, some updates for every peer."""

    operations = OF_COLLECTIVES

    def __init__(self, updates: int) -> None:
        self.updates = updates
        self.name = f"lax.ragged_all_to_all {updates}"

    def start(self, operation: str, problem: Problem, chained: int) -> Started:
        """Compiles it; combine is the way back."""
        counts, received = problem.routes.counts, problem.routes.recv_capacity
        if operation == "dispatch":
            rows, num_rows = problem.take(problem.routes.sent_tokens()), received
        else:
            counts, num_rows = counts.T, problem.shape.tokens * problem.shape.choices
            rows = problem.fill(received)
        operands = [problem.split(a) for a in ragged_operands(counts, self.updates)]

        def transfer(rows: jax.Array, *operands: jax.Array) -> jax.Array:
            output = jax.lax.empty((num_rows, problem.shape.hidden), rows.dtype)
            output = compat.vary_over(output, compat.varying_axes(rows))
            return jax.lax.ragged_all_to_all(rows, output, *operands, axis_name=AXIS)

        arguments = [(x, *operands) for x in rows]
        return _start(transfer, arguments, problem, chained, "ragged-all-to-all")


class AllToAll:
    """jax.lax.all_to_all of as many bytes as all (token, expert) rows, the same to every peer."""

    name = "lax.all_to_all"
    operations = OF_COLLECTIVES

    def start(self, operation: str, problem: Problem, chained: int) -> Started:
        """Compiles it; both operations are the same transfer."""
        per_peer = -(-problem.shape.tokens * problem.shape.choices // problem.num_ranks)
        arguments = [(x,) for x in problem.fill(problem.num_ranks * per_peer)]

        def transfer(rows: jax.Array) -> jax.Array:
            return jax.lax.all_to_all(rows, AXIS, 0, 0, tiled=True)

        return _start(transfer, arguments, problem, chained, "all-to-all")


class GatherScatter:
    """jax.lax.all_gather of all tokens; psum_scatter of every rank's sums for all tokens."""

    name = "all_gather/psum_scatter"
    operations = OF_COLLECTIVES

    def start(self, operation: str, problem: Problem, chained: int) -> Started:
        """Compiles the counterpart of the operation."""
        if operation == "dispatch":

            def gather(x: jax.Array) -> jax.Array:
                return jax.lax.all_gather(x, AXIS, tiled=True)

            arguments = [(operands.x,) for operands in problem.sets]
            return _start(gather, arguments, problem, chained, "all-gather")

        def scatter(sums: jax.Array) -> jax.Array:
            return jax.lax.psum_scatter(sums, AXIS, tiled=True)

        arguments = [(x,) for x in problem.fill(problem.num_ranks * problem.shape.tokens)]
        return _start(scatter, arguments, problem, chained, "reduce-scatter")


def _start(
    transfer: Callable[..., Any],
    arguments: list[tuple[Any, ...]],
    problem: Problem,
    chained: int,
    collective: str,
) -> Started:
    # A collective of one rank is nothing, and XLA removes it.
    evidence = collective if problem.num_ranks > 1 else None
    return start_sharded(transfer, arguments, problem.mesh, chained, evidence)


# In this order in every case; jax_ep's limited variants follow it.
CONTENDERS: tuple[Contender, ...] = (
    Ceiling(),
    Ours(),
    RaggedAllToAll(1),
    RaggedAllToAll(64),
    AllToAll(),
    GatherScatter(),
)
NAMES = tuple(contender.name for contender in CONTENDERS)


def choose_contenders(names: list[str] | None, num_sms: list[int] | None) -> list[Contender]:
    """Those named, or all; jax_ep also with each limit of multiprocessors."""
    chosen: list[Contender] = []
    for contender in CONTENDERS:
        if names is None or contender.name in names:
            chosen.append(contender)
            if isinstance(contender, Ours):
                chosen += [Ours(limit) for limit in dict.fromkeys(num_sms or ())]
    return chosen
