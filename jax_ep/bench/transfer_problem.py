"""The operands of a case on all devices, and programs over all of them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep.bench import hlo
from jax_ep.bench.cases import ROTATED_BYTES
from jax_ep.bench.measure import Started
from jax_ep.bench.transfer_cases import Shape
from jax_ep.bench.transfer_routes import Routes, choose_experts

AXIS = "expert"
MOST_SETS = 16  # few tokens do not fill the L2 in any bearable number of sets


class Operands(NamedTuple):
    """What is sent, of all ranks one after another, split over them.

    Attributes:
      x: [R * T, H] bfloat16.
      topk_ids: int32[R * T, K].
      topk_weights: float32[R * T, K], positive, with a sum of 1.
    """

    x: jax.Array
    topk_ids: jax.Array
    topk_weights: jax.Array


@dataclasses.dataclass(frozen=True)
class Problem:
    """What all contenders of a case send.

    Attributes:
      mesh: one axis, named AXIS.
      shape: of every rank's operands.
      routes: the same for all sets.
      sets: of operands, to be used in turn.
    """

    mesh: Mesh
    shape: Shape
    routes: Routes
    sets: list[Operands]

    @property
    def num_ranks(self) -> int:
        """R."""
        return self.mesh.size

    @property
    def remote_bytes(self) -> int:
        """De-duplicated bytes that leave or reach the busiest rank."""
        return self.routes.busiest_pairs * self.shape.row_bytes

    def split(self, array: np.ndarray) -> jax.Array:
        """[R, n, ...] as [R * n, ...] on the devices, array[r] on rank r."""
        flat = array.reshape(-1, *array.shape[2:])
        return jax.device_put(flat, NamedSharding(self.mesh, P(AXIS)))

    def take(self, tokens: np.ndarray) -> list[jax.Array]:
        """[R * n, H] of every set: the tokens int[R, n] that each rank has of its own."""
        index = self.split(tokens)
        take = jax.jit(sharded(lambda x, index: x[index], self.mesh))
        return jax.block_until_ready([take(operands.x, index) for operands in self.sets])

    def fill(self, num_rows: int) -> list[jax.Array]:
        """[R * num_rows, H] of every set: the tokens of each rank again and again."""
        tokens = np.arange(num_rows) % self.shape.tokens
        return self.take(np.broadcast_to(tokens, (self.num_ranks, num_rows)))


def make_mesh(num_devices: int) -> Mesh:
    """The first devices, on one axis."""
    devices = jax.devices()[:num_devices]
    return jax.make_mesh((num_devices,), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def make_problem(
    mesh: Mesh, shape: Shape, routing: str, rotated_bytes: float = ROTATED_BYTES
) -> Problem:
    """Random operands: 2 to 16 sets, as many as make a rank's tokens span `rotated_bytes`."""
    ids = choose_experts(shape, mesh.size, routing)
    weights = np.random.default_rng(1).random(ids.shape, np.float32) + np.float32(0.1)
    weights /= weights.sum(-1, keepdims=True)
    number = math.ceil(rotated_bytes / (shape.tokens * shape.row_bytes))
    problem = Problem(mesh, shape, Routes(ids, shape.experts), [])
    sharding = NamedSharding(mesh, P(AXIS))
    normal = jax.jit(
        functools.partial(
            jax.random.normal, shape=(mesh.size * shape.tokens, shape.hidden), dtype=jnp.bfloat16
        ),
        out_shardings=sharding,
    )
    topk_ids, topk_weights = problem.split(ids), problem.split(weights)
    for seed in range(min(max(2, number), MOST_SETS)):
        x = jax.block_until_ready(normal(jax.random.key(seed)))
        problem.sets.append(Operands(x, topk_ids, topk_weights))
    return problem


# ---- programs


def sharded(function: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """`function` of one rank's arrays, on all ranks."""
    return jax.shard_map(function, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))


def chain(transfer: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """Makes one function of `calls` calls of `transfer`, one straight after another.

    All have the same arguments. The first passes through barriers together with the last result: to
    the compiler it is another value for every call, and is there when the last call has ended. So
    calls are neither merged nor put side by side, and no kernel is between them. Two barriers, as
    XLA trims from a barrier what has no other reader, and with it the call that it comes from.

    Returns:
      The function, of `transfer`'s arguments: the last result.
    """

    def chained(x: jax.Array, *others: Any) -> Any:
        result = transfer(x, *others)
        for _ in range(calls - 1):
            arrays = jax.tree.leaves(result)
            for _ in range(2):
                x, *_ = jax.lax.optimization_barrier((x, *arrays))
            result = transfer(x, *others)
        return result

    return chained


def start_sharded(
    transfer: Callable[..., Any],
    arguments: list[tuple[Any, ...]],
    mesh: Mesh,
    chained: int,
    evidence: str | None,
) -> Started:
    """Compiles `chained` calls of `transfer` by themselves, over all ranks.

    Args:
      transfer: of one rank's arrays; the first argument is one array.
      arguments: for calls in turn, split over the ranks.
      mesh: the ranks.
      chained: see `chain`.
      evidence: the custom call or collective that must be in the program `chained` times; None
        demands nothing.

    Raises:
      RuntimeError: it is there more or less often, so that something else would be timed.
    """
    is_cpu = jax.default_backend() == "cpu"
    program = jax.jit(sharded(chain(transfer, chained), mesh))
    # XLA:CPU drops barriers, and then merges equal calls; for GPUs it keeps them to the end.
    options: dict[str, Any] = {"xla_disable_hlo_passes": "cse_barrier_expander"} if is_cpu else {}
    compiled = program.lower(*arguments[0]).compile(compiler_options=options)
    text = compiled.as_text() or ""
    facts = {"custom_calls": hlo.custom_calls(text), "collectives": hlo.collectives(text)}
    found = hlo.custom_calls(text) | hlo.collectives(text)
    if evidence is not None and found.get(evidence) != chained:
        raise RuntimeError(
            f"the compiled program should have {evidence} {chained} times, but has "
            f"{found or 'no such call'}; something else would be timed. Compare the program's HLO "
            "(XLA_FLAGS=--xla_dump_to)."
        )

    def call(given: tuple[Any, ...]) -> Any:
        result = compiled(*given)
        # CPU devices share threads: two programs at once may wait for each other for ever.
        return jax.block_until_ready(result) if is_cpu else result

    return Started(call, arguments, repeats=chained, facts=facts)
