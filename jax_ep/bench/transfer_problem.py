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
    """Makes one function of `calls` calls of `transfer`, all between first and last in a loop.

    All have the same arguments. The first passes through a barrier together with something of the
    last result: to the compiler it is another value in every step, so that no call is merged with
    another or moved out of the loop. The barrier itself costs nothing. Steps carry a number made of
    one element of each array of a result: the compiler may copy what is carried.

    Returns:
      The function, of `transfer`'s arguments: the last result, and that number, float32[1], because
      what nobody reads is not computed.
    """

    def chained(x: jax.Array, *others: Any) -> Any:
        def carry(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            arrays = jax.lax.optimization_barrier(jax.tree.leaves(transfer(x, *others)))
            some = [a.reshape(-1)[:1].astype(jnp.float32) for a in arrays if a.size > 0]
            return x, functools.reduce(jnp.add, some)

        def step(state: Any, _: None) -> Any:
            return carry(jax.lax.optimization_barrier(state)[0]), None

        state, _ = jax.lax.scan(step, carry(x), length=calls - 2)
        x, number = jax.lax.optimization_barrier(state)
        return transfer(x, *others), number

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
      evidence: the custom call or collective that must be in the program, and in its loop if there
        is one; None demands nothing.

    Raises:
      RuntimeError: the evidence is missing, so that something else would be timed.
    """
    is_chained = chained > 1
    program = jax.jit(sharded(chain(transfer, chained) if is_chained else transfer, mesh))
    compiled = program.lower(*arguments[0]).compile()
    text = compiled.as_text() or ""
    facts = {"custom_calls": hlo.custom_calls(text), "collectives": hlo.collectives(text)}
    has_loop = chained > 2
    repeated = hlo.loops(text) if has_loop else text
    found = hlo.custom_calls(repeated) | hlo.collectives(repeated)
    if evidence is not None and evidence not in found:
        raise RuntimeError(
            f"the compiled program has no {evidence} where it is expected "
            f"({'in its loop' if has_loop else 'anywhere'}), but {found or 'no such call'}; "
            "something else would be timed. Compare the program's HLO (XLA_FLAGS=--xla_dump_to)."
        )

    def call(given: tuple[Any, ...]) -> Any:
        result = compiled(*given)
        if is_chained:
            result, _ = result
        # CPU devices share threads: two programs at once may wait for each other for ever.
        return jax.block_until_ready(result) if jax.default_backend() == "cpu" else result

    return Started(call, arguments, repeats=chained, facts=facts)
