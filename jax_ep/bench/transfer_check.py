"""Whether jax_ep's results are right, against numpy on the host."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np

import jax_ep
from jax_ep.bench.transfer_problem import Operands
from jax_ep.bench.transfer_routes import Routes

# Of a token: each rank's partial sum is rounded to bfloat16, and so is the sum of these; with a
# little more for float32. All terms have the token's sign, so no error grows by cancellation.
COMBINE_ERROR = 2 * 2.0**-8 * 1.01


def check_dispatch(dispatched: jax_ep.Dispatched, operands: Operands, routes: Routes) -> None:
    """Every rank has its rows in the order (local expert, source rank, token, choice), bit-exact.

    Raises:
      ArithmeticError: it has not.
    """
    x = np.asarray(operands.x).view(np.uint16)
    weights = np.asarray(operands.topk_weights).ravel()
    group_sizes = np.bincount(routes.topk_ids.ravel(), minlength=routes.num_experts)
    if not np.array_equal(dispatched.group_sizes, group_sizes):
        raise ArithmeticError("dispatch is wrong: its group sizes are not the experts' counts")
    assert dispatched.row_weights is not None  # as weights were given
    received = zip(by_rank(dispatched.rows), by_rank(dispatched.row_weights), strict=True)
    for rank, (rows, row_weights) in enumerate(received):
        choices = routes.received(rank)
        tokens = choices // routes.topk_ids.shape[2]
        wrong = (rows[: len(choices)].view(np.uint16) != x[tokens]).any(1)
        wrong |= row_weights[: len(choices)] != weights[choices]
        if wrong.any():
            raise ArithmeticError(
                f"dispatch is wrong: {wrong.sum()} of {len(wrong)} rows of rank {rank} are not "
                f"the token and weight expected, row {wrong.argmax()} first"
            )


def check_combine(combined: jax.Array, operands: Operands) -> None:
    """With experts that return their rows, each token is itself times the sum of its weights.

    Raises:
      ArithmeticError: some element is further off than bfloat16's roundings allow.
    """
    sums = np.asarray(operands.topk_weights).sum(1, dtype=np.float32, keepdims=True)
    of_ranks = zip(by_rank(combined), by_rank(operands.x), strict=True)
    for rank, (out, x) in enumerate(of_ranks):
        expected = x.astype(np.float32) * sums[rank * len(x) : (rank + 1) * len(x)]
        error = np.abs(out.astype(np.float32) - expected)
        wrong = ~(error <= COMBINE_ERROR * np.abs(expected))  # NaN is wrong
        if wrong.any():
            token = int(wrong.any(1).argmax())
            raise ArithmeticError(
                f"combine is wrong: {wrong.any(1).sum()} of {len(wrong)} tokens of rank {rank} are "
                f"not the sum of their rows within {COMBINE_ERROR:.2g}, token {token} first, which "
                f"is off by {np.nanmax(error[token]):.2g}"
            )


def by_rank(array: jax.Array) -> Iterator[np.ndarray]:
    """The part of each rank in order; one after another, because these are gigabytes."""
    shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return (np.asarray(shard.data) for shard in shards)
