"""The primitives of transfers in flight: a start per transfer, and what joins any of them.

* dispatch_start, redispatch_start, combine_start: as those without start, but the results may be
  read after transfer_done only
* transfer_done: the results and the operands of a start -> the first of its results, in the same
  memory
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching

from jax_ep._src.core import primitive
from jax_ep._src.core.compat import Aval
from jax_ep._src.transfer import primitives
from jax_ep._src.transfer.params import TransferParams

_TRANSFERS = {
    "dispatch": primitives.DISPATCH,
    "redispatch": primitives.REDISPATCH,
    "combine": primitives.COMBINE,
}


def as_buffers[T](operands: T) -> T:
    """Returns the operands of a start as arrays of their own, for the start and for done.

    XLA would fuse a slice into the start, which then reads a part of another array, and done, with
    a copy of that part, would not keep the other array alive.
    """
    buffers: T = lax.optimization_barrier(operands)
    return buffers


def bind_start(
    operation: str, operands: Sequence[jax.Array], params: TransferParams, **flags: bool
) -> list[jax.Array]:
    """Starts a transfer, and returns its results."""
    results: list[jax.Array] = _STARTS[operation].bind(*operands, params=params, **flags)
    return results


def bind_done(
    operation: str,
    results: Sequence[jax.Array],
    operands: Sequence[jax.Array],
    params: TransferParams,
    *,
    plan: Sequence[jax.Array] = (),
    **flags: bool,
) -> list[jax.Array]:
    """Returns the results of a start, once they are there.

    The plan that dispatch_start makes comes apart. It is not returned in its memory, because XLA
    would first copy it for the backward pass, while it is in flight. It is there when the results
    are.
    """
    joined: list[jax.Array] = transfer_done_p.bind(
        *results,
        *plan,
        *operands,
        operation=operation,
        num_results=len(results),
        num_others=len(plan),
        flags=tuple(flags.items()),
        params=params,
    )
    return joined


def _define_start(operation: str) -> Primitive:
    transfer = _TRANSFERS[operation]
    start = primitive.define_primitive(f"{operation}_start", **transfer.definition)

    batch = primitive.one_after_another(transfer.primitive)

    def batch_without_start(
        operands: Sequence[Any], dims: Sequence[Any], params: TransferParams, **flags: bool
    ) -> Any:
        # Nothing is in flight from one iteration of a loop to the next.
        params = dataclasses.replace(params, lane=0, num_lanes=1)
        return batch(operands, dims, params=params, **flags)

    batching.primitive_batchers[start] = batch_without_start
    return start


_STARTS = {operation: _define_start(operation) for operation in _TRANSFERS}


# ---- transfer_done


def _done_avals(*avals: Aval, num_results: int, **_: Any) -> list[Aval]:
    return list(avals[:num_results])


def _done_reference(*arrays: jax.Array, num_results: int, **_: Any) -> list[jax.Array]:
    return list(arrays[:num_results])


def _done_attributes(avals: list[Aval], *, num_results: int, **_: Any) -> dict[str, Any]:
    return {"num_results": np.int64(num_results)}


def _done_unsupported(
    avals: list[Aval],
    params: TransferParams,
    operation: str,
    num_results: int,
    num_others: int,
    flags: tuple[tuple[str, bool], ...],
) -> str | None:
    # Nothing joins what was not started.
    unsupported = _TRANSFERS[operation].definition["unsupported"]
    operands = avals[num_results + num_others :]
    reason: str | None = unsupported(operands, params=params, **dict(flags))
    return reason


def _done_unsupported_on(devices: Any, params: TransferParams, **_: Any) -> str | None:
    reason: str | None = primitives.DISPATCH.definition["unsupported_on"](devices, params=params)
    return reason


def _done_aliases(*, num_results: int, **_: Any) -> dict[int, int]:
    return {index: index for index in range(num_results)}


def _done_batched(arrays: Sequence[Any], dims: Sequence[Any], num_results: int, **_: Any) -> Any:
    return list(arrays[:num_results]), list(dims[:num_results])


transfer_done_p = primitive.define_primitive(
    "transfer_done",
    abstract_eval=_done_avals,
    reference=_done_reference,
    attributes=_done_attributes,
    unsupported=_done_unsupported,
    unsupported_on=_done_unsupported_on,
    aliases=_done_aliases,
)
batching.primitive_batchers[transfer_done_p] = _done_batched
