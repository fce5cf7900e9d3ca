"""Measures how much of a layer's transfers matmuls can hide, if nothing depends on anything.

  python -P tools/overlap_ceiling.py --out ceiling.json
  python -P tools/overlap_ceiling.py --passes both --recipe fp8

A layer's dispatch and combine are in flight on a few SMs beside its experts, whose matmuls leave
these free; "apart" is the same one after another. Both passes have two of either, beside all six
matmuls. Both run sustained, and with pauses between programs that hold the mean power at --watts:
times exclude the pauses. A ratio over 1 is what a fused pair could gain at most. Needs
nvidia-ml-py.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import jax_ep
from jax_ep import quant
from jax_ep._src.transfer.dispatch import dispatched
from jax_ep.bench.common.energy import Boards
from jax_ep.bench.common.programs import AXIS, implementation, sharded
from jax_ep.bench.layer.calls import Calls, Values, values_of
from jax_ep.bench.layer.problem import MODELS, Shape, make_problem
from jax_ep.bench.transfer.problem import make_mesh

SECONDS = 1.5
RECIPES = {
    "bfloat16": None,
    "fp8": quant.Recipe(),
    "fp8_gradients": quant.Recipe(quantized_weight_gradients=True),
}
# Tokens and rows, each those of the layer before, and a check sum.
Carry = tuple[jax.Array, jax.Array, jax.Array]
Layer = Callable[[Carry, Values, Any], Carry]


@dataclasses.dataclass(frozen=True)
class Parts:
    """The two halves of a layer, which form a chain each.

    Attributes:
      calls: the transfers.
      recipe: of the experts, whose quantized weights are given.
      both_passes: or the forward pass alone.
    """

    calls: Calls
    recipe: quant.Recipe | None
    both_passes: bool

    @property
    def rounds(self) -> int:
        """How many dispatches and combines there are."""
        return 2 if self.both_passes else 1

    def experts(
        self, rows: jax.Array, check: jax.Array, v: Values, quantized: Any, num_sms: int | None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the results of the experts, or the gradients of their rows, and the check sum.

        The sum is what needs the gradients of weights. Otherwise nothing would compute them.
        """

        def forward(rows: jax.Array, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
            y: jax.Array = jax_ep.grouped_mlp(
                rows,
                w_up,
                w_down,
                v.plan.group_sizes,
                row_weights=v.row_weights,
                quantization=self.recipe,
                quantized_weights=quantized,
                num_sms=num_sms,
                implementation=implementation(),
            )
            return y

        operands = rows, v.operands.w_up, v.operands.w_down
        if not self.both_passes:
            return forward(*operands), check
        y, backward = jax.vjp(forward, *operands)
        rows_bar, *weights_bar = backward(y)
        return rows_bar, check + sum(weight.reshape(-1)[:1] for weight in weights_bar)

    def transfers(self, x: jax.Array, v: Values) -> jax.Array:
        """One transfer after another, on all SMs."""
        for _ in range(self.rounds):
            sent = self.calls.dispatch(x, v.operands.topk_ids, v.operands.topk_weights)
            x = self.calls.combine(sent.rows, sent.plan)
        return x

    def in_flight(self, x: jax.Array, v: Values, num_sms: int) -> jax_ep.InFlight:
        """Starts the same, one behind the other in a lane."""
        routes, by = self.calls.problem.routes, implementation()
        for _ in range(self.rounds):
            sending = jax_ep.dispatch_start(
                x,
                v.operands.topk_ids,
                v.operands.topk_weights,
                num_experts=routes.num_experts,
                axis_name=AXIS,
                recv_capacity=routes.recv_capacity,
                zero_tail=False,
                num_sms=num_sms,
                implementation=by,
            )
            # Only what follows in the lane may read them now.
            rows, row_weights, plan = sending.results
            sent = dispatched(rows, row_weights, plan, sending.params)
            returning = jax_ep.combine_start(
                sent.rows, sent.plan, None, num_sms=num_sms, implementation=by
            )
            x = returning.results
        return returning


def apart(parts: Parts) -> Layer:
    """The transfers, then the experts."""

    def layer(carry: Carry, v: Values, quantized: Any) -> Carry:
        x, rows, check = carry
        x = parts.transfers(x, v)
        x, rows = lax.optimization_barrier((x, rows))
        return x, *parts.experts(rows, check, v, quantized, None)

    return layer


def beside(parts: Parts, num_sms: int, num_sms_of_experts: int) -> Layer:
    """The same, the transfers in flight beside the experts."""

    def layer(carry: Carry, v: Values, quantized: Any) -> Carry:
        x, rows, check = carry

        def experts(x: jax.Array, rows: jax.Array, check: jax.Array) -> Carry:
            return x, *parts.experts(rows, check, v, quantized, num_sms_of_experts)

        returning = parts.in_flight(x, v, num_sms)
        returning, (x, rows, check) = jax_ep.overlap(returning, experts, x, rows, check)
        x, _ = lax.optimization_barrier((jax_ep.combine_done(returning), x))
        return x, rows, check

    return layer


def transfers(parts: Parts, num_sms: int | None = None) -> Layer:
    """The transfers alone: in flight on so many SMs, or on all."""

    def layer(carry: Carry, v: Values, quantized: Any) -> Carry:
        x, rows, check = carry
        if num_sms is None:
            return parts.transfers(x, v), rows, check
        returning = parts.in_flight(x, v, num_sms)
        x, _ = lax.optimization_barrier((jax_ep.combine_done(returning), x))
        return x, rows, check

    return layer


def experts(parts: Parts, num_sms: int | None = None) -> Layer:
    """The experts alone, on so many SMs, or on all."""

    def layer(carry: Carry, v: Values, quantized: Any) -> Carry:
        x, rows, check = carry
        return x, *parts.experts(rows, check, v, quantized, num_sms)

    return layer


class Program:
    """Layers one after another, as one compiled program."""

    def __init__(
        self, layer: Layer, values: Values, quantized: Any, mesh: Any, num_layers: int
    ) -> None:
        def run(carry: Carry, v: Values, quantized: Any) -> Carry:
            for _ in range(num_layers):
                carry = layer(carry, v, quantized)
            return carry

        x = values.operands.x
        check = jnp.zeros(mesh.size, x.dtype, device=jax.NamedSharding(mesh, P(AXIS)))
        self.arguments = (x, values.rows, check), values, quantized
        self.compiled = jax.jit(sharded(run, mesh)).lower(*self.arguments).compile()
        self.num_layers = num_layers
        self()

    def __call__(self) -> float:
        """Runs it, and returns the seconds of one layer."""
        begin = time.perf_counter()
        jax.block_until_ready(self.compiled(*self.arguments))
        return (time.perf_counter() - begin) / self.num_layers

    def sustained(self, boards: Boards, count: int) -> dict[str, float]:
        """Returns the seconds of a layer and the watts of a board, the boards never idle."""
        begin, first, calls, running = time.perf_counter(), boards.joules(), 0, None
        while time.perf_counter() - begin < SECONDS:
            following = self.compiled(*self.arguments)
            jax.block_until_ready(running)
            calls, running = calls + 1, following
        jax.block_until_ready(running)
        passed = time.perf_counter() - begin
        watts = (boards.joules() - first) / passed / count
        return {"seconds": passed / calls / self.num_layers, "watts": watts}

    def paused(self, boards: Boards, count: int, pause: float, seconds: float) -> dict[str, float]:
        """Returns the median seconds of a layer without pauses, and the watts with them."""
        begin, first, times = time.perf_counter(), boards.joules(), []
        while (passed := time.perf_counter() - begin) < seconds:
            times.append(self())
            time.sleep(pause)
        watts = (boards.joules() - first) / passed / count
        return {"seconds": statistics.median(times), "watts": watts, "pause": pause}

    def at_power(self, boards: Boards, count: int, watts: float) -> dict[str, float]:
        """Measures with the pause that holds the boards at this power."""
        pause = 0.3 * self() * self.num_layers
        for _ in range(3):
            found = self.paused(boards, count, pause, 0.5)
            cycle = found["seconds"] * self.num_layers + pause
            pause = max(0.0, cycle * (found["watts"] - 110) / (watts - 110) - (cycle - pause))
        return self.paused(boards, count, pause, SECONDS)


def measure_shape(name: str, arguments: argparse.Namespace, mesh: Any, boards: Boards) -> Any:
    """Returns what each form of the layer takes, in both regimes."""
    shape = Shape(arguments.tokens, *MODELS[name])
    problem = make_problem(mesh, shape, "bfloat16", 1, backward=False)
    values = values_of(problem)[0]
    recipe = RECIPES[arguments.recipe]
    quantized = None
    if recipe is not None:
        quantize = functools.partial(quant.quantize_experts, quantization=recipe)
        weights = values.operands.w_up, values.operands.w_down
        quantized = jax.jit(sharded(quantize, mesh))(*weights)
    parts = Parts(Calls(problem, keep=False), recipe, arguments.passes == "both")
    total = getattr(jax.devices()[0], "core_count", 132)
    forms: dict[str, Layer] = {"apart": apart(parts)}
    alone: dict[str, Layer] = {"transfers": transfers(parts), "experts": experts(parts)}
    for sms in arguments.num_sms:
        forms[f"beside, {sms} SMs"] = beside(parts, sms, total - sms)
        alone[f"transfers on {sms}"] = transfers(parts, sms)
        alone[f"experts on {total - sms}"] = experts(parts, total - sms)
    results = {}
    for form, layer in (forms | alone).items():
        program = Program(layer, values, quantized, mesh, arguments.layers)
        program.paused(boards, mesh.size, 0, 0.7)  # settles
        results[form] = {"sustained": program.sustained(boards, mesh.size)}
        if form in forms:
            results[form]["paused"] = program.at_power(boards, mesh.size, arguments.watts)
        Console(width=150).print(name, form, results[form])
    return results


def main() -> None:
    """Measures all shapes, and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["qwen3-30b", "deepseek-v3"], metavar="NAME")
    parser.add_argument("--tokens", type=int, default=4096, help="per rank")
    parser.add_argument("--passes", choices=("forward", "both"), default="forward")
    parser.add_argument("--recipe", choices=tuple(RECIPES), default="bfloat16", help="of experts")
    parser.add_argument("--num-sms", type=int, nargs="+", default=[8, 16, 24], help="of transfers")
    parser.add_argument("--layers", type=int, default=6, help="per program")
    parser.add_argument("--watts", type=float, default=550.0, help="with pauses")
    parser.add_argument("--out", type=pathlib.Path)
    arguments = parser.parse_args()
    mesh = make_mesh(jax.device_count())
    boards = Boards(jax.device_count())
    results = {name: measure_shape(name, arguments, mesh, boards) for name in arguments.shapes}
    table = Table("layer", "form", "µs", "apart / it", "W", "µs, paused", "apart / it", "W")
    for name, forms in results.items():
        for form, both in forms.items():
            cells = []
            for regime, found in both.items():
                ratio = forms["apart"][regime]["seconds"] / found["seconds"]
                cells += [f"{1e6 * found['seconds']:.0f}", f"{ratio:.3f}", f"{found['watts']:.0f}"]
            table.add_row(name, form, *cells)
    Console(width=120).print(f"{jax.device_count()} x {jax.devices()[0].device_kind}", table)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
