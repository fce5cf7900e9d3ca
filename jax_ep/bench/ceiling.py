"""The contender that does nothing but fill the links: rows to all other ranks by bulk copies."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._src import compat
from jax_ep._src.checks import expert_axis
from jax_ep.bench.measure import Started
from jax_ep.bench.transfer_cases import OPERATIONS
from jax_ep.bench.transfer_problem import AXIS, Problem, start_sharded

REPEATS = 8
TARGET = "jax_ep.bulk_copy_ceiling.v1"


class Ceiling:
    """As many bytes from every rank as leave the busiest one, `REPEATS` times a call.

    There is nothing to find, each row has one place, and ranks meet once a call. What it takes is
    what the links take: no dispatch or combine can be faster. GPUs only.
    """

    name = "ceiling"
    operations = OPERATIONS

    def start(self, operation: str, problem: Problem, chained: int) -> Started:
        """Compiles it; all operations are the same transfer."""
        if jax.default_backend() != "gpu":
            raise NotImplementedError("bulk copies need GPUs")
        if problem.num_ranks < 2:
            raise NotImplementedError("one rank has nobody to send to")
        rows = -(-problem.remote_bytes // problem.shape.row_bytes)
        arguments = [(x,) for x in problem.fill(rows)]
        started = start_sharded(send_to_all, arguments, problem.mesh, chained, TARGET)
        return Started(
            started.call, arguments, repeats=REPEATS * chained, facts={"rows": rows} | started.facts
        )


def send_to_all(x: jax.Array) -> jax.Array:
    """Sends x [T, H] to the other ranks' workspaces, in turn; int32[1]: 0 if all took part."""
    axis = expert_axis("ceiling", AXIS)
    call = jax.ffi.ffi_call(TARGET, compat.aval_like(jax.typeof(x), (1,), jnp.int32))
    attributes: dict[str, Any] = {
        "replica_groups": axis.replica_groups().reshape(-1),
        "group_size": np.int64(axis.size),
        "num_sms": np.int64(0),
        "repeats": np.int64(REPEATS),
    }
    return call(x, **attributes)
