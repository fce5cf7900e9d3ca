"""The providers of transfers: jax_ep, the ceiling of bulk copies, and the collectives of JAX.

The baselines' operands are laid out, counted and cut beforehand, so that only the transfer itself
is timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_ep
from jax_ep._src.core import checks, compat
from jax_ep.bench.common.benchmark import Case, Provider, Started
from jax_ep.bench.common.programs import AXIS, implementation, sharded, start_sharded
from jax_ep.bench.common.report import OURS
from jax_ep.bench.transfer.problem import Problem

OPERATIONS: tuple[str, ...] = ("dispatch", "redispatch", "combine")
COLLECTIVE_OPERATIONS: tuple[str, ...] = ("dispatch", "combine")
CEILING = "ceiling"
CEILING_TARGET = "jax_ep.bulk_copy_ceiling.v1"
CEILING_REPEATS = 8

Transfer = Callable[..., Any]


class Ours:
    """jax_ep's operations; on GPUs their kernels or an error.

    The first results must have the bits of the pure-JAX implementation.
    """

    operations: tuple[str, ...] = OPERATIONS

    def __init__(self, num_sms: int | None = None, domain_size: int | None = None) -> None:
        self.num_sms, self.domain_size = num_sms, domain_size
        self.name = OURS if num_sms is None else f"{OURS} {num_sms} SMs"
        if domain_size is not None:
            self.name += f" domains of {domain_size}"

    def start(self, case: Case, problem: Problem) -> Started:
        """Compiles one operation and checks its result."""
        chosen = implementation(problem.mesh, self.domain_size)
        target = case.operation.partition("_")[0]  # without a format
        evidence = f"jax_ep.{target}.v1" if chosen == "cuda" else None
        transfer = self.transfers(problem, chosen)[case.operation]
        expected = self.transfers(problem, "xla")[case.operation]
        arguments = self.arguments(case.operation, problem)
        started = start_sharded(transfer, arguments, problem.mesh, case.chained, evidence)
        compare = jax.jit(
            sharded(functools.partial(wrong_elements, transfer, expected), problem.mesh)
        )
        shards = compare(*arguments[0]).addressable_shards  # those of this process
        wrong = np.concatenate([shard.data for shard in shards])
        if wrong.any():
            raise ArithmeticError(
                f"{case.operation} is wrong: the elements that differ from the pure-JAX "
                f"implementation's, by rank, are {wrong.tolist()}"
            )
        started.facts.update(checked=True, num_sms=self.num_sms, domain_size=self.domain_size)
        return started

    def transfers(self, problem: Problem, implementation: str | None) -> dict[str, Transfer]:
        """Returns the functions of one rank's arrays that are compiled."""
        options: dict[str, Any] = {"num_sms": self.num_sms, "implementation": implementation}
        dispatch = functools.partial(
            jax_ep.dispatch,
            num_experts=problem.shape.experts,
            axis_name=AXIS,
            recv_capacity=problem.routes.recv_capacity,
            zero_tail=False,
            nvlink_domain_size=self.domain_size,
            **options,
        )
        redispatch = functools.partial(jax_ep.redispatch, **options)
        combine = functools.partial(jax_ep.combine, **options)
        return {"dispatch": dispatch, "redispatch": redispatch, "combine": combine}

    def arguments(self, operation: str, problem: Problem) -> list[tuple[Any, ...]]:
        """Returns the operands of calls in turn."""
        if operation == "dispatch":
            return [tuple(operands) for operands in problem.sets]
        chosen = implementation(problem.mesh, self.domain_size)
        transfers = Ours(domain_size=self.domain_size).transfers(problem, chosen)
        dispatch = jax.jit(sharded(transfers["dispatch"], problem.mesh))
        arguments = []
        for operands in problem.sets:
            sent = jax.block_until_ready(dispatch(*operands))
            arguments.append(
                (sent.rows, sent.plan, sent.row_weights)
                if operation == "combine"
                else (operands.x, sent.plan, operands.topk_weights)
            )
        return arguments


def wrong_elements(transfer: Transfer, expected: Transfer, *arguments: Any) -> jax.Array:
    """Counts the elements in which two transfers of one rank differ, bit by bit: int32[1]."""

    def bits(result: Any) -> list[jax.Array]:
        if isinstance(result, jax_ep.Dispatched):  # without the tail, which is unspecified
            assert result.row_weights is not None  # as weights were given
            sizes = result.group_sizes
            rows = jax.tree.map(lambda a: jax_ep.mask_tail(a, sizes), result.rows)
            result = [rows, jax_ep.mask_tail(result.row_weights, sizes), sizes]
        return [
            jax.lax.bitcast_convert_type(a, f"uint{jax.dtypes.itemsize_bits(a.dtype)}")
            for a in jax.tree.leaves(result)
        ]

    pairs = zip(bits(transfer(*arguments)), bits(expected(*arguments)), strict=True)
    return jnp.stack([(a != b).sum() for a, b in pairs]).sum()[None]


# ---- baselines


class Baseline:
    """A provider that is a function of a case: what is compiled, its arguments, the evidence."""

    def __init__(
        self,
        name: str,
        prepare: Callable[[str, Problem], tuple[Transfer, list[tuple[Any, ...]], str]],
        operations: tuple[str, ...] = COLLECTIVE_OPERATIONS,
        repeats: int = 1,
    ):
        self.name = name
        self.prepare = prepare
        self.operations = operations
        self.repeats = repeats

    def start(self, case: Case, problem: Problem) -> Started:
        """Compiles it. A collective of one rank is nothing: XLA removes it."""
        transfer, arguments, evidence = self.prepare(case.operation, problem)
        started = start_sharded(
            transfer,
            arguments,
            problem.mesh,
            case.chained,
            evidence if problem.num_ranks > 1 else None,
        )
        repeats = started.repeats * self.repeats
        return Started(started.call, arguments, repeats=repeats, facts=started.facts)


def ceiling(operation: str, problem: Problem) -> tuple[Transfer, list[tuple[Any, ...]], str]:
    """Bulk copies of as many bytes from every rank as leave the busiest one. GPUs only.

    There is nothing to find, each row has one destination, and ranks wait once per call. It takes
    what the links take: no dispatch or combine can be faster.
    """
    if jax.default_backend() != "gpu":
        raise NotImplementedError("bulk copies need GPUs")
    if problem.num_ranks < 2:
        raise NotImplementedError("one rank has nobody to send to")
    rows = -(-problem.remote_bytes // problem.shape.row_bytes)
    return send_to_all, [(x,) for x in problem.fill(rows)], CEILING_TARGET


def send_to_all(x: jax.Array) -> jax.Array:
    """Sends x [T, H] to the peers' workspaces, in turn; int32[1]: 0 if all ranks took part."""
    axis = checks.expert_axis(CEILING, AXIS)
    call = jax.ffi.ffi_call(CEILING_TARGET, compat.aval_like(jax.typeof(x), (1,), jnp.int32))
    attributes: dict[str, Any] = {
        "replica_groups": axis.replica_groups().reshape(-1),
        "group_size": np.int64(axis.size),
        "num_sms": np.int64(0),
        "repeats": np.int64(CEILING_REPEATS),
    }
    return call(x, **attributes)


def ragged_all_to_all(
    updates: int, operation: str, problem: Problem
) -> tuple[Transfer, list[tuple[Any, ...]], str]:
    """lax.ragged_all_to_all of all (token, expert) rows; combine is the way back."""
    counts, received = problem.routes.counts, problem.routes.recv_capacity
    if operation == "dispatch":
        rows, num_rows = problem.take(problem.routes.sent_tokens()), received
    else:
        counts, num_rows = counts.T, problem.shape.tokens * problem.shape.top_k
        rows = problem.fill(received)

    def transfer(rows: jax.Array, *operands: jax.Array) -> jax.Array:
        output = jax.lax.empty((num_rows, problem.shape.hidden), rows.dtype)
        output = compat.vary_over(output, compat.varying_axes(rows))
        return jax.lax.ragged_all_to_all(rows, output, *operands, axis_name=AXIS)

    operands = [problem.split(a) for a in ragged_operands(counts, updates)]
    return transfer, [(x, *operands) for x in rows], "ragged-all-to-all"


def ragged_operands(counts: np.ndarray, updates: int) -> tuple[np.ndarray, ...]:
    """Returns the input offsets, send sizes, output offsets and receive sizes of all ranks.

    Rows lie by destination where they are sent and by source where they arrive.

    Args:
      counts: int[R, R], the rows that a rank (first) sends to another (second).
      updates: the number of nearly equal updates per peer.

    Returns:
      Arrays int32[R, R * updates], row r for rank r. Entry p * updates + u is the u-th update that
      is sent to rank p, or for the receive sizes received from it.
    """
    cuts = counts[..., None] * np.arange(updates + 1) // updates  # [R, R, updates + 1]
    starts, sizes = cuts[..., :-1], np.diff(cuts)
    in_sender = (np.cumsum(counts, axis=1) - counts)[..., None]
    in_receiver = (np.cumsum(counts, axis=0) - counts)[..., None]
    arrays = in_sender + starts, sizes, in_receiver + starts, sizes.swapaxes(0, 1)
    return tuple(array.reshape(len(counts), -1).astype(np.int32) for array in arrays)


def all_to_all(operation: str, problem: Problem) -> tuple[Transfer, list[tuple[Any, ...]], str]:
    """lax.all_to_all of as many bytes as all (token, expert) rows, the same to every peer."""
    per_peer = -(-problem.shape.tokens * problem.shape.top_k // problem.num_ranks)
    transfer = functools.partial(
        jax.lax.all_to_all, axis_name=AXIS, split_axis=0, concat_axis=0, tiled=True
    )
    return transfer, [(x,) for x in problem.fill(problem.num_ranks * per_peer)], "all-to-all"


def gather_scatter(operation: str, problem: Problem) -> tuple[Transfer, list[tuple[Any, ...]], str]:
    """lax.all_gather of all tokens; psum_scatter of every rank's sums for all tokens."""
    if operation == "dispatch":
        gather = functools.partial(jax.lax.all_gather, axis_name=AXIS, tiled=True)
        return gather, [(operands.x,) for operands in problem.sets], "all-gather"
    scatter = functools.partial(jax.lax.psum_scatter, axis_name=AXIS, tiled=True)
    sums = problem.fill(problem.num_ranks * problem.shape.tokens)
    return scatter, [(x,) for x in sums], "reduce-scatter"


PROVIDERS: tuple[Provider, ...] = (
    Baseline(CEILING, ceiling, OPERATIONS, CEILING_REPEATS),
    Ours(),
    Baseline("lax.ragged_all_to_all 1", functools.partial(ragged_all_to_all, 1)),
    Baseline("lax.ragged_all_to_all 64", functools.partial(ragged_all_to_all, 64)),
    Baseline("lax.all_to_all", all_to_all),
    Baseline("all_gather/psum_scatter", gather_scatter),
)
